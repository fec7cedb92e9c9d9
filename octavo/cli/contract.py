"""The contract as small cases that any backend can be held to."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from octavo import ops
from octavo.api import BatchAttention, attend
from octavo.bench.verify import LOG2_ROUNDING
from octavo.bench.workloads import Inputs, Workload, make_inputs
from octavo.cli.targets import PADDING_ROWS, Target, judge, poisoned
from octavo.kv_cache import PagedKV
from octavo.problem import AttentionSpec, PagedBatch
from octavo.reference import merge_reference, page_ids, sequence_lengths

MIXED = Workload("mixed", (3, 0, 1, 18, 40), (20, 7, 33, 18, 70))
DEAD = Workload("dead rows", (5, 4, 3, 20), (2, 0, 3, 1))
DECODE = Workload("decode", (1,) * 6, (1, 64, 65, 300, 0, 129))
LONG = Workload("one long sequence", (1,), (1500,))
SPEC = AttentionSpec(8, 2, 64, page_size=4)


@dataclass(frozen=True)
class Attention:
    """Attention over one batch, in all rows under the tolerance rule."""

    spec: AttentionSpec = SPEC
    workload: Workload = MIXED
    sm_scale: float | None = None
    exact_dtype: bool = False
    change: Callable[[Inputs], Inputs] = lambda p: p

    def __call__(self, target: Target) -> str:
        p = self.change(poisoned(self.workload, target.fit(self.spec, exact=self.exact_dtype), target))
        return judge(p, *target.attend(p, self.sm_scale), self.sm_scale)


def dense(p: Inputs) -> Inputs:
    """The same batch as a block table; entries that must not be read are far outside the cache."""
    _, kv_lens = sequence_lengths(p.batch, p.spec.page_size)
    counts = [-(-n // p.spec.page_size) for n in kv_lens]
    table = torch.full((len(counts), max(counts) + 2), 1 << 30, dtype=torch.int32)
    for sequence, count in enumerate(counts):
        table[sequence, :count] = page_ids(p.batch, sequence, count).cpu()
    lengths = torch.tensor(kv_lens, dtype=torch.int32)
    return replace(p, batch=PagedBatch.dense(p.batch.qo_indptr.cpu(), table, lengths).to(p.q.device))


def int64(p: Inputs) -> Inputs:
    b = p.batch
    tensors = (b.qo_indptr, b.page_table, b.kv_indptr, b.last_page_len, b.kv_lens)
    return replace(p, batch=PagedBatch(*(None if x is None else x.long() for x in tensors)))  # type: ignore[arg-type]


def hnd(p: Inputs) -> Inputs:
    k, v = (x.transpose(1, 2).contiguous() for x in (p.kv.k_cache, p.kv.v_cache))
    return replace(p, kv=PagedKV(k, v, layout="HND"))


def combined(p: Inputs) -> Inputs:
    return replace(p, kv=PagedKV.combined(torch.stack([p.kv.k_cache, p.kv.v_cache], 1)))


def packed(p: Inputs) -> Inputs:
    both = torch.cat([p.kv.k_cache, p.kv.v_cache], -1)
    return replace(p, kv=PagedKV.packed(both, p.spec.head_dim, layout="NHD"))


def fused_qkv(p: Inputs) -> Inputs:
    """q as a slice of a wider tensor whose rest is NaN."""
    wide = p.q.new_full((p.q.shape[0], p.q.shape[1] + 4, p.q.shape[2]), math.nan)
    wide[:, : p.q.shape[1]] = p.q
    return replace(p, q=wide[:, : p.q.shape[1]])


def planned(target: Target) -> str:
    """One workspace serves batches of other lengths; plan and run give the bits of a single call."""
    spec = target.fit(SPEC)
    max_tokens, max_sequences = MIXED.num_tokens + PADDING_ROWS, len(MIXED.qo_lens)
    attention = BatchAttention(
        spec, device=target.device, max_tokens=max_tokens, max_sequences=max_sequences, backend=target.backend
    )
    for workload in (MIXED, DEAD, MIXED):
        p = poisoned(workload, spec, target)
        out, lse = (torch.full_like(x, math.nan) for x in target.attend(p))
        attention.plan(p.batch, num_tokens=p.q.shape[0])
        attention.run(p.q, p.kv, out=out, lse=lse)
        wrong = judge(p, out, lse)
        if wrong:
            return f"{workload.name}: {wrong}"
    return ""


def repeated(target: Target) -> str:
    p = poisoned(MIXED, target.fit(SPEC), target)
    first, second = target.attend(p), target.attend(p)
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return "" if same else "expected the same bits from two calls, got others"


def appended(target: Target) -> str:
    """New tokens land at the ends of their sequences, and nothing else is written."""
    p = poisoned(MIXED, target.fit(SPEC), target)
    expected = [x.clone() for x in (p.kv.k_cache, p.kv.v_cache)]
    new = [torch.randn_like(x[:1, 0].expand(p.q.shape[0], -1, -1)) for x in expected]
    q_lens, kv_lens = sequence_lengths(p.batch, p.spec.page_size)
    row = 0
    for sequence, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        ids = page_ids(p.batch, sequence, -(-kv_len // p.spec.page_size))
        for token in range(q_len):
            position = kv_len - q_len + token
            page, slot = ids[position // p.spec.page_size], position % p.spec.page_size
            for cache, rows in zip(expected, new, strict=True):
                cache[page, slot] = rows[row]
            row += 1
    ops.append(*new, p.kv.k_cache, p.kv.v_cache, ops.pack_batch(p.batch), target.by_name)
    got = (p.kv.k_cache, p.kv.v_cache)
    same = [torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(got, expected, strict=True)]
    return "" if all(same) else "expected new rows at the ends of their sequences alone, got another cache"


def merged(target: Target) -> str:
    """States over disjoint keys combine to the state over all keys; empty states are neutral."""
    spec = replace(target.fit(SPEC), page_size=1, causal=False)
    whole = make_inputs(Workload("whole", (6,), (40,)), spec, target.device)
    states = []
    for low, high in ((0, 9), (9, 9), (9, 40)):
        part = torch.tensor([low, high], dtype=torch.int32, device=target.device)
        states.append(target.attend(replace(whole, batch=replace(whole.batch, kv_indptr=part))))
    outs, lses = ([s[i] for s in states] for i in (0, 1))
    out, lse = ops.merge(outs, lses, target.by_name)
    exact_out, exact_lse = merge_reference(outs, lses)
    off = float((out.cpu().double() - exact_out).abs().max())
    if not off <= torch.finfo(spec.dtype).eps * float(exact_out.abs().max()):
        return f"expected out within one rounding of the exact merge, got {off:.3g} off"
    off = float((lse.cpu().double() - exact_lse).abs().max())
    # One exp2 and one log2 lie between the states and the merged lse.
    allowed = 2 * LOG2_ROUNDING * max(1.0, float(exact_lse.abs().max()))
    return "" if off <= allowed else f"expected lse of the exact merge, got {off:.3g} off"


def empty(target: Target) -> str:
    p = poisoned(Workload("empty", (), ()), target.fit(SPEC), target)
    return judge(p, *target.attend(p))


def refused(target: Target) -> str:
    """Wrong input is refused by name, and nothing is written."""
    p = poisoned(MIXED, target.fit(SPEC), target)
    ptr = p.batch.kv_indptr
    assert ptr is not None
    wrong = {
        "q": replace(p, q=p.q.double()),
        "head count": replace(p, q=p.q[:, :3].contiguous()),
        "last dimension": replace(p, q=p.q.transpose(1, 2).contiguous().transpose(1, 2)),
        "indptr length": replace(p, batch=replace(p.batch, kv_indptr=ptr[:-1])),
        "page ids": replace(p, batch=replace(p.batch, page_table=p.batch.page_table + p.kv.num_pages)),
        "falling indptr": replace(p, batch=replace(p.batch, kv_indptr=ptr.flip(0))),
    }
    taken = []
    for name, bad in wrong.items():
        try:
            PagedBatch.csr(bad.batch.qo_indptr, bad.batch.kv_indptr, bad.batch.page_table, bad.batch.last_page_len)  # type: ignore[arg-type]
            attend(bad.q, bad.kv, bad.batch, backend=target.backend, validate=True)
            taken.append(name)
        except (ValueError, TypeError) as error:
            if "fix:" not in str(error):
                taken.append(f"{name} (the error names no fix)")
    return f"expected an error for wrong {', '.join(taken)}, got none" if taken else ""


@dataclass(frozen=True)
class Case:
    """One line of the contract. `check` says why a target breaks it, or ""; it raises Skip where it does not apply."""

    name: str
    check: Callable[[Target], str]


def cases() -> list[Case]:
    """The contract, in order."""
    found: dict[str, Callable[[Target], str]] = {
        "causal": Attention(),
        "not causal": Attention(replace(SPEC, causal=False)),
        "decode": Attention(workload=DECODE),
        "one long sequence": Attention(workload=LONG),
        "rows that see no key": Attention(workload=DEAD),
        "rows that see no key, not causal": Attention(replace(SPEC, causal=False), DEAD),
        "no sequence": empty,
    }
    found |= {f"page size {n}": Attention(replace(SPEC, page_size=n)) for n in (1, 5, 16, 64)}
    groups = ((1, 1), (3, 1), (28, 4), (12, 1), (32, 1), (64, 1))
    found |= {
        f"{q} query heads, {kv} K/V": Attention(replace(SPEC, num_qo_heads=q, num_kv_heads=kv)) for q, kv in groups
    }
    dims = ((16, 16), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
    found |= {f"head dim {d}, value dim {v}": Attention(replace(SPEC, head_dim=d, value_dim=v)) for d, v in dims}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found[str(dtype).removeprefix("torch.")] = Attention(replace(SPEC, dtype=dtype), exact_dtype=True)
    found |= {f"scale {s}": Attention(sm_scale=s) for s in (0.0, -0.2, 3.0)}
    found |= {
        "block table": Attention(change=dense),
        "int64 indices": Attention(change=int64),
        "HND storage": Attention(change=hnd),
        "combined storage": Attention(change=combined),
        "packed storage": Attention(change=packed),
        "q inside a wider tensor": Attention(change=fused_qkv),
        "one plan, other lengths": planned,
        "same bits twice": repeated,
        "append": appended,
        "merge": merged,
        "wrong input refused": refused,
    }
    return [Case(name, check) for name, check in found.items()]
