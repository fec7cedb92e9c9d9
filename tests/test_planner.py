"""The planner kernel against its Python model, item for item, and the model against what a schedule must be."""

import os
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import work_item
from octavo.backends.triton import TritonBackend
from octavo.planning.schedule import ScheduleConfig, SequenceShape, WorkItem, max_items, schedule, visible_keys
from octavo.problem import AttentionSpec, PagedBatch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

lengths = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=0, max_size=12)
heads = st.sampled_from([(1, 1), (8, 1), (4, 2), (7, 1), (6, 2), (32, 4)])
l2_sizes = st.sampled_from([1, 4000, 1 << 30])
block_ms = st.sampled_from([16, 64, 128])


def shapes_of(pairs, page_size=1, padding=0):
    """The sequences and the padding, as the planner sees a CSR batch."""
    shapes, start, position = [], 0, 0
    for q_len, kv_len in pairs:
        shapes.append(SequenceShape(start, q_len, kv_len, position))
        start, position = start + q_len, position - (-kv_len // page_size)
    return [*shapes, SequenceShape(start, padding, 0, 0)]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    lengths, heads, block_ms, st.booleans(), st.integers(0, 40), st.integers(1, 9), st.sampled_from([1, 4000, 1 << 30])
)
def test_every_row_is_written_once_and_sees_its_keys(pairs, heads, block_m, causal, padding, dead_tiles, l2_bytes):
    spec = AttentionSpec(*heads, head_dim=16, causal=causal)
    shapes = shapes_of(pairs, padding=padding)
    items = schedule(spec, shapes, ScheduleConfig(block_m, dead_tiles, l2_bytes))
    seen = Counter()
    for item in items:
        shape = shapes[item.sequence]
        for row in range(item.row_begin, item.row_begin + item.row_count):
            token = row // spec.group_size
            if token < shape.q_len:
                seen[item.sequence, item.kv_head, row] += 1
                keys = visible_keys(spec, shape, token)
                assert item.key_begin <= min(item.full_end, keys) and keys <= item.key_end
        assert item.row_count == block_m or item.key_end == 0
    rows = {
        (i, h, r)
        for i, s in enumerate(shapes)
        for h in range(spec.num_kv_heads)
        for r in range(s.q_len * spec.group_size)
    }
    assert seen == Counter(rows)
    tokens = sum(s.q_len for s in shapes)
    assert len(items) <= max_items(spec, tokens, len(pairs), block_m)


@given(lengths, heads, block_ms)
@settings(deadline=None, derandomize=True, max_examples=50)
def test_longest_items_do_not_come_last(pairs, heads, block_m):
    """Sequences are taken by falling number of keys: greedy assignment then ends within one short item of balance."""
    spec = AttentionSpec(*heads, head_dim=16)
    shapes = shapes_of(pairs)
    order = list(dict.fromkeys(item.sequence for item in schedule(spec, shapes, ScheduleConfig(block_m))))
    assert [shapes[i].kv_len for i in order] == sorted((shapes[i].kv_len for i in order), reverse=True)


def test_heads_that_fit_the_l2_together_are_interleaved():
    spec = AttentionSpec(4, 4, head_dim=16)
    head_bytes = 1000 * (16 + 16) * 2
    items = schedule(spec, shapes_of([(32, 1000)]), ScheduleConfig(16, l2_bytes=2 * head_bytes))
    assert [(item.kv_head, item.row_begin) for item in items] == [
        (0, 16), (1, 16), (0, 0), (1, 0), (2, 16), (3, 16), (2, 0), (3, 0),
    ]  # fmt: skip


def read_plan(plan):
    count = int(plan[work_item.NUM_ITEMS])
    words = plan[work_item.HEADER_WORDS :].view(-1, work_item.ITEM_WORDS)[:count].cpu().tolist()
    return [
        WorkItem(*w[:3], (w[4] << 32) | (w[3] & 0xFFFFFFFF), *w[5:12], w[12], w[13], w[14])  # noqa: RUF100
        for w in words
    ]


def plan_on_device(spec, batch, num_tokens, block_m):
    backend = TritonBackend()
    words = backend.plan_words(spec, num_tokens, batch.num_sequences, block_m)
    plan = torch.full((words,), -1, dtype=torch.int32, device=batch.device)
    backend.plan(spec, batch, num_tokens, block_m, plan)
    assert int(plan[work_item.ITEMS_TAKEN]) == 0
    return read_plan(plan)


def csr(pairs, page_size, index_dtype):
    pages = [-(-kv // page_size) for _, kv in pairs]
    last = [kv - (p - 1) * page_size if p else 0 for (_, kv), p in zip(pairs, pages, strict=True)]

    def indptr(lens):
        return torch.tensor([0, *lens], device=DEVICE).cumsum(0).to(index_dtype)

    indices = torch.zeros(sum(pages), dtype=torch.int32, device=DEVICE)
    return PagedBatch.csr(
        indptr([q for q, _ in pairs]), indptr(pages), indices, torch.tensor(last, dtype=index_dtype, device=DEVICE)
    )


BATCHES = [
    [],
    [(0, 0)],
    [(1, 1)],
    [(5, 40), (0, 7), (3, 0), (20, 12), (1, 1)],
    [(300, 2), (2, 300), (129, 129)],
    [(40, 1), (0, 90), (100, 0), (7, 33)],
    [(i % 3, 7 * i % 50) for i in range(40)],
    [(1, 100)] * 18,
]


FORMS = [(True, 1, 16, torch.int32), (False, 3, 64, torch.int64), (True, 16, 128, torch.int64)]


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("pairs", BATCHES, ids=lambda p: f"{len(p)}seq{sum(q for q, _ in p)}")
@pytest.mark.parametrize(("causal", "page_size", "block_m", "dtype"), FORMS)
def test_kernel_equals_model(pairs, causal, page_size, block_m, dtype):
    spec = AttentionSpec(14, 2, head_dim=16, page_size=page_size, causal=causal)
    padding = 5
    tokens = sum(q for q, _ in pairs) + padding
    got = plan_on_device(spec, csr(pairs, page_size, dtype), tokens, block_m)
    want = schedule(spec, shapes_of(pairs, page_size, padding), ScheduleConfig(block_m))
    # The padding has no pages: its position in the table is whatever the clamp gives.
    assert [strip(x, len(pairs)) for x in got] == [strip(x, len(pairs)) for x in want]


def strip(item, padding_sequence):
    return WorkItem(**{**vars(item), "page_position": 0}) if item.sequence == padding_sequence else item


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")
def test_dense_table_equals_model():
    spec = AttentionSpec(8, 2, head_dim=16, page_size=4)
    kv_lens = torch.tensor([9, 0, 16], dtype=torch.int32, device=DEVICE)
    table = torch.zeros(3, 6, dtype=torch.int32, device=DEVICE)[:, :4]
    batch = PagedBatch.dense(torch.tensor([0, 2, 3, 40], dtype=torch.int32, device=DEVICE), table, kv_lens)
    shapes = [
        SequenceShape(0, 2, 9, 0),
        SequenceShape(2, 1, 0, 6),
        SequenceShape(3, 37, 16, 12),
        SequenceShape(40, 0, 0, 0),
    ]
    assert plan_on_device(spec, batch, 40, 16) == schedule(spec, shapes, ScheduleConfig(16))


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")
def test_broken_indptr_stays_inside_the_tensors():
    spec = AttentionSpec(4, 2, head_dim=16)
    qo = torch.tensor([0, 9, 4, 900], dtype=torch.int32, device=DEVICE)
    kv = torch.tensor([0, 50, -3, 70], dtype=torch.int32, device=DEVICE)
    batch = PagedBatch.csr(qo, kv, torch.zeros(20, dtype=torch.int32, device=DEVICE))
    items = plan_on_device(spec, batch, 12, 16)
    assert items
    for item in items:
        assert item.q_start >= 0 and item.q_start + item.q_len <= 12
        assert item.page_position >= 0 and item.page_position + item.kv_len <= 20


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")
def test_falling_indptr_does_not_outgrow_the_plan():
    spec = AttentionSpec(4, 2, head_dim=16)
    qo = torch.tensor([0, 100] * 20, dtype=torch.int32, device=DEVICE)
    batch = PagedBatch.csr(qo, torch.zeros_like(qo), torch.zeros(1, dtype=torch.int32, device=DEVICE))
    backend = TritonBackend()
    words = backend.plan_words(spec, 100, 39, 16)
    guarded = torch.full((words + 4096,), -1, dtype=torch.int32, device=DEVICE)
    backend.plan(spec, batch, 100, 16, guarded[:words])
    assert (guarded[words:] == -1).all()
    assert int(guarded[work_item.NUM_ITEMS]) <= max_items(spec, 100, 39, 16)
