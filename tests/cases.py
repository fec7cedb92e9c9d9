"""Small inputs from public bug reports on paged attention (repository#issue beside each): examples of kinds of fault.

A case is a function of `make(qo_lens, kv_lens, **fields of Case)`, which builds 32 query heads, 4 K/V heads, head_dim
128, page_size 1, and poisons whatever must not be read. It returns the problem, or the problem and the rows specified.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from inputs import I64, Problem

from octavo import PagedBatch, PagedKV

Make = Callable[..., Problem]
SCALE = 1 / math.sqrt(128)


@dataclass(frozen=True)
class Regression:
    """A case, where it was reported, and whether it takes some GB of memory."""

    make: Callable[[Make], Problem | tuple[Problem, list[int]]]
    reports: tuple[str, ...]
    heavy: bool

    @property
    def name(self) -> str:
        return self.make.__name__


CASES: list[Regression] = []


def reported(*reports: str, heavy: bool = False):
    def register(function):
        CASES.append(Regression(function, reports, heavy))
        return function

    return register


# Rows and sequences that see nothing


@reported("flashinfer-ai/flashinfer#4452", "Dao-AILab/flash-attention#443")
def rows_without_keys(make):
    """q_len 34, kv_len 1, as captured by flashinfer-bench: 33 rows are empty, also across tiles."""
    return make((34, 300, 130), (1, 2, 129), seed=1)


@reported("Dao-AILab/flash-attention#1537", "Dao-AILab/flash-attention#2562", "Dao-AILab/flash-attention#1713")
def zero_query_sequences(make):
    """Sequences with keys but no queries, single and in runs; indptr repeats."""
    return make((0, 4, 0, 0, 65, 1, 0), (9, 4, 0, 33, 200, 1, 5), seed=3)


@reported("flashinfer-ai/flashinfer#353")
def no_kv_at_all(make):
    """kv_indices has no elements (null pointer); all rows are empty."""
    problem = make((4, 2), (0, 0), seed=4)
    b = problem.batch
    return problem.with_(batch=PagedBatch.csr(b.qo_indptr, b.kv_indptr, b.page_table[:0]))


@reported("Dao-AILab/flash-attention#1159")
def no_tokens_at_all(make):
    """No query at all: an empty result, not a launch error."""
    return make((0, 0), (3, 0), seed=5, padding=0)


# Memory that must not matter


@reported(
    "vllm-project/vllm#936",
    "Dao-AILab/flash-attention#1745",
    "Dao-AILab/flash-attention#2374",
    "Dao-AILab/flash-attention#2407",
    "vllm-project/vllm#47305",
)
def nan_in_unused_pages(make):
    """Lengths round a tile edge; every page outside kv_indices is NaN, page 0 too."""
    lengths = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129)
    problem = make(lengths, lengths, seed=6)
    k, v = (torch.cat([torch.full_like(x[:1], math.nan), x]) for x in (problem.kv.k_cache, problem.kv.v_cache))
    b = problem.batch
    return problem.with_(kv=PagedKV(k, v), batch=PagedBatch.csr(b.qo_indptr, b.kv_indptr, b.page_table + 1))


@reported("sgl-project/sglang#15757", "Dao-AILab/flash-attention#1228")
def padded_query_rows(make):
    """q has NaN rows after qo_indptr[-1] (padded batch)."""
    return make((21, 3), (21, 60), seed=10, padding=8)


# Range of the softmax


@reported("flashinfer-ai/flashinfer#4267", "flashinfer-ai/flashinfer#4450", "flashinfer-ai/flashinfer#4451")
def all_logits_very_negative(make):
    """Raw q.k near -2e5 (massive activations): finite, so the row is a normal softmax."""
    problem = make((1, 9, 1), (1, 70, 64), seed=12)
    problem.q.fill_(448.0)
    keys = problem.batch.page_table[:135].long()
    steps = torch.arange(135, device=keys.device) % 7 / 8
    problem.kv.k_cache[keys] = (-(3.5 + steps)).to(problem.q.dtype)[:, None, None, None]
    return problem


@reported("Dao-AILab/flash-attention#2082")
def first_tile_masked_then_negative(make):
    """q 88, kv 448, causal: the rightmost tile is masked for early rows, later logits are all far below 0."""
    problem = make((88,), (448,), seed=13)
    problem.q.abs_().mul_(4)
    problem.kv.k_cache.abs_().neg_().mul_(8)
    return problem


@reported("flashinfer-ai/flashinfer#4267")
def large_positive_logits(make):
    """Logits to about 3e4 before the scale: exp must be taken after the maximum is subtracted."""
    return make((5, 130), (66, 130), seed=15, gain=40.0)


@reported("Dao-AILab/flash-attention#1461", "flashinfer-ai/flashinfer#4401")
def negative_scale(make):
    """A running maximum of raw q.k overflows or underflows when the scale is negative."""
    problem = make((9, 130), (200, 130), seed=16, sm_scale=-SCALE)
    problem.q.mul_(24)
    return problem


@reported("flashinfer-ai/flashinfer#3100")
def scale_as_tensor(make):
    return make((3,), (70,), seed=18).with_(sm_scale=torch.tensor(SCALE, dtype=torch.float32))


@reported(
    "flashinfer-ai/flashinfer#2113",
    "sgl-project/sglang#35045",
    "vllm-project/vllm#47079",
    "flashinfer-ai/flashinfer#4485",
)
def lse_is_base_2(make):
    """Zero queries: lse is exactly log2(visible keys), a natural log is off by 1/ln 2."""
    problem = make((64,), (64,), seed=19)
    problem.q.zero_()
    return problem


# Masks, pages, layout


@reported("gittensor-ai-lab/sparkinfer#3")
def bottom_right_alignment(make):
    return make((5, 1, 100), (133, 513, 101), seed=20)


@reported("ROCm/rocm-libraries#10180", "sgl-project/sglang#24853")
def shared_prefix_duplicates(make):
    """Sequences share prefix pages, one repeats a page, ids descend: order and repeats count."""
    problem = make((40, 40, 6), (90, 90, 6), seed=21)
    ids = problem.batch.page_table
    ids[90:150] = ids[:60].clone()
    ids[:90] = ids[:90].flip(0).clone()
    ids[180:186] = ids[0].clone()
    return problem


@reported(
    "flashinfer-ai/flashinfer#311",
    "flashinfer-ai/flashinfer#553",
    "Dao-AILab/flash-attention#2886",
    "Dao-AILab/flash-attention#2670",
)
def query_is_a_view_of_qkv(make):
    """q is a slice of a fused qkv projection, so its row stride is that of all heads. Called twice: a cached launch."""
    return make((33, 4), (33, 90), seed=22, q_storage="fused qkv")


@reported("vllm-project/vllm-xpu-kernels#258", "vllm-project/vllm#50427")
def kv_interleaved(make):
    """k = kv[:, 0], v = kv[:, 1] of one buffer: page stride doubles and v has a storage offset."""
    return make((33, 4), (33, 90), seed=24, kv_storage="combined")


@reported("flashinfer-ai/flashinfer#725", "flashinfer-ai/flashinfer#1654", "flashinfer-ai/flashinfer#1492")
def int64_indices(make):
    """The known failure is silent: sequence 1 all zero."""
    return make((3, 5), (20, 70), seed=27, index_dtypes=(I64,) * 4)


@reported("flashinfer-ai/flashinfer#996", "flashinfer-ai/flashinfer#2986", "mlc-ai/mlc-llm#2543")
def group_size_7(make):
    """28 / 4 heads (Qwen2-7B): packed rows of one query straddle a tile edge."""
    return make((37, 1, 66), (80, 129, 66), seed=30, heads=(28, 4))


@reported("sgl-project/sglang#1281", "triton-lang/triton#621")
def head_dim_96(make):
    return make((37, 1), (80, 129), seed=32, dims=(96, 96))


# Sizes


@reported("flashinfer-ai/flashinfer#5177", "vllm-project/vllm#40023")
def one_row_many_keys_next_to_long_prefill(make):
    """Decode rows beside a prefill chunk: keys are split for some rows only, and a merge must skip the others."""
    return make((1, 1, 257, 1), (2049, 1, 700, 4500), seed=34)


@reported(
    "flashinfer-ai/flashinfer#3136",
    "ROCm/aiter#2517",
    "ROCm/aiter#2608",
    "vllm-project/vllm#47671",
    "local-inference-lab/b12x#20",
    heavy=True,
)
def page_offset_over_2_31(make):
    """4.3M pages of 512 elements: element offsets pass 2^31 and byte offsets 2^32."""
    pages, keys = 4_300_000, 200
    problem = make((70,), (keys,), seed=35)
    b = problem.batch
    old = b.page_table[:keys].long()
    new = torch.arange(pages - keys, pages, device=b.device)

    def move(cache):
        large = torch.empty(pages, *cache.shape[1:], dtype=cache.dtype, device=cache.device)
        large[new] = cache[old]
        return large

    kv = PagedKV(move(problem.kv.k_cache), move(problem.kv.v_cache))
    return problem.with_(kv=kv, batch=PagedBatch.csr(b.qo_indptr, b.kv_indptr, new.to(torch.int32)))


@reported("sgl-project/sglang#20389", heavy=True)
def query_offset_over_2_31(make):
    """524,400 rows of 4096 elements pass 2^31; all but the last 64 belong to a sequence without keys."""
    rows, tail = 524_400, 64
    problem = make((0, tail), (0, 100), seed=36, padding=0)
    q = torch.empty(rows, *problem.q.shape[1:], dtype=problem.q.dtype, device=problem.q.device)
    q[-tail:] = problem.q
    b = problem.batch
    qo_indptr = torch.tensor([0, rows - tail, rows], dtype=torch.int32, device=b.device)
    problem = problem.with_(q=q, batch=PagedBatch.csr(qo_indptr, b.kv_indptr, b.page_table))
    return problem, [0, 1, rows - tail - 1, *range(rows - tail, rows)]
