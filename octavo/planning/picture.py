"""A schedule as people look at it: which worker has which item when, how even the load is, what time that predicts.

Workers take items in their list's order, each as soon as it is free; the small list begins when the main one has
ended. An item takes as long as its tensor-core work or its K/V reads, at its worker's share of the device, whichever
is longer.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from octavo.planning.form import PlanForm
from octavo.planning.schedule import Schedule, SequenceShape, WorkItem
from octavo.problem import AttentionSpec

H200_SMS = 132
_H200_FLOPS, _H200_BYTES = 712e12, 4.26e12


@dataclass(frozen=True)
class Machine:
    """What a device can do, as far as predictions go. Times beside the rates were fitted to runs on one H200."""

    num_sms: int
    flops_per_s: float
    """Of a large matrix product in the spec's dtype."""
    bytes_per_s: float
    """Of a large copy, read plus written."""
    cache_factor: float = 2.0
    """Keys that another tile has read come from the L2, faster by this."""
    item_s: float = 2e-6
    """Spent on an item beside its keys."""
    list_s: float = 9e-6
    """Spent on a list beside its items: launch, first loads, last stores."""
    least_sms: int = 40
    """SMs that together can take all of the memory's bandwidth."""

    @classmethod
    def h200(cls, spec: AttentionSpec, num_sms: int = H200_SMS) -> "Machine":
        """So many of an H200's SMs before its memory. float32 products are three of tf32, at half the rate."""
        each = _H200_FLOPS / H200_SMS / (6 if spec.dtype == torch.float32 else 1)
        return cls(num_sms, num_sms * each, _H200_BYTES)


@dataclass(frozen=True)
class Span:
    """An item at work: seconds from the beginning of the first list."""

    item: WorkItem
    worker: int
    begin: float
    end: float


@dataclass(frozen=True)
class ListPicture:
    """One list of a plan, at work."""

    name: str
    block_m: int
    workers: int
    programs_per_sm: int
    spans: list[Span]
    empty: int
    """Places in the list with nothing to do."""
    begin: float
    end: float

    @property
    def cut_tiles(self) -> int:
        return sum(1 for s in self.spans if s.item.num_splits > 1 and s.item.split == 0)

    @property
    def parts(self) -> int:
        return sum(1 for s in self.spans if s.item.num_splits > 1)

    @property
    def storing(self) -> int:
        """Items that write rows without keys, and do nothing else."""
        return sum(1 for s in self.spans if s.item.key_end <= s.item.key_begin)

    @property
    def longest_keys(self) -> int:
        return max((s.item.key_end - s.item.key_begin for s in self.spans), default=0)

    @property
    def ideal_keys(self) -> float:
        """Keys of one tile that each worker would have if all had the same."""
        return sum(s.item.key_end - s.item.key_begin for s in self.spans) / self.workers

    @property
    def longest_over_ideal(self) -> float:
        """Longest item over the mean load of a worker, in keys; below 1 every worker has more than one item."""
        return self.longest_keys / self.ideal_keys if self.ideal_keys else 0.0

    @property
    def busy(self) -> float:
        """Share of the workers' time, from the list's begin to its end, that items take."""
        whole = self.workers * (self.end - self.begin)
        return sum(s.end - s.begin for s in self.spans) / whole if whole else 1.0


@dataclass(frozen=True)
class Picture:
    """A batch's schedule, at work on a machine."""

    spec: AttentionSpec
    machine: Machine
    lists: list[ListPicture]
    rows: int
    """(token, query head) pairs that are written."""
    dead_rows: int
    """Those of them that see no key."""
    flops: float
    bytes: float
    """Least memory traffic: K/V, page ids and q that are used read once, out and lse written once."""

    @property
    def seconds(self) -> float:
        """Predicted, from the first list's launch to the last one's end; the planner's own time is not in it."""
        return max(self.lists[-1].end if self.lists else 0.0, self.bound_seconds)

    @property
    def compute_seconds(self) -> float:
        return self.flops / self.machine.flops_per_s

    @property
    def memory_seconds(self) -> float:
        return self.bytes / self.machine.bytes_per_s

    @property
    def bound_seconds(self) -> float:
        """The roofline: below it the batch can't run on this machine."""
        return max(self.compute_seconds, self.memory_seconds)


def picture(spec: AttentionSpec, schedule: Schedule, form: PlanForm, machine: Machine) -> Picture:
    """A schedule made under `form`, at work on `machine`.

    A list whose form names no workers, as its tiles are never cut, has one for each SM.
    """
    lists: list[ListPicture] = []
    clock = 0.0
    for name, items, block_m, workers in (
        ("main", schedule.main, form.block_m, form.workers),
        ("small", schedule.small, form.small_m, form.small_workers),
    ):
        if items:
            lists.append(_run_list(spec, name, items, block_m, workers or machine.num_sms, machine, clock))
            clock = lists[-1].end
    # Every sequence with tokens, and the padding, has an item.
    shapes = list({x.sequence: _shape_of(x) for x in (*schedule.main, *schedule.small)}.values())
    rows = sum(s.q_len for s in shapes) * spec.num_qo_heads
    dead = sum(_dead_tokens(spec, s) for s in shapes) * spec.num_qo_heads
    return Picture(spec, machine, lists, rows, dead, _flops(spec, shapes), _bytes(spec, shapes))


def _shape_of(item: WorkItem) -> SequenceShape:
    return SequenceShape(item.q_start, item.q_len, item.kv_len, item.page_position)


def _run_list(
    spec: AttentionSpec, name: str, items: list[WorkItem], block_m: int, workers: int, machine: Machine, begin: float
) -> ListPicture:
    full = [item for item in items if item.row_count]
    tiles = _readers(full)
    start = begin + machine.list_s
    active = max(min(len(full), workers), 1)
    free = [(start, worker) for worker in range(workers)]
    spans = []
    for item in full:
        at, worker = heapq.heappop(free)
        end = at + _item_seconds(spec, item, block_m, tiles, workers, active, machine)
        spans.append(Span(item, worker, at, end))
        heapq.heappush(free, (end, worker))
    programs = max(workers // machine.num_sms, 1)
    end = max((s.end for s in spans), default=start)
    return ListPicture(name, block_m, workers, programs, spans, len(items) - len(full), begin, end)


def _readers(items: Iterable[WorkItem]) -> dict[int, int]:
    """By sequence: tiles of a K/V head that read its keys."""
    rows: dict[int, set[int]] = {}
    for item in items:
        if item.key_end > item.key_begin:
            rows.setdefault(item.sequence, set()).add(item.row_begin)
    return {sequence: len(begins) for sequence, begins in rows.items()}


def _item_seconds(
    spec: AttentionSpec,
    item: WorkItem,
    block_m: int,
    tiles: dict[int, int],
    workers: int,
    active: int,
    machine: Machine,
) -> float:
    keys, dims = item.key_end - item.key_begin, spec.head_dim + spec.v_dim
    width = spec.dtype.itemsize
    # Fewer programs than fill the device get more of the bandwidth each, up to what an SM can take.
    least = machine.least_sms * max(workers // machine.num_sms, 1)
    bandwidth = machine.bytes_per_s / max(active, min(least, workers))
    if keys <= 0:
        return item.row_count * (spec.v_dim * width + 4) / bandwidth
    readers = tiles[item.sequence]
    read = keys * dims * width * (1 / readers + (1 - 1 / readers) / machine.cache_factor)
    compute = 2.0 * block_m * keys * dims / (machine.flops_per_s / workers)
    return machine.item_s + max(compute, read / bandwidth)


def _dead_tokens(spec: AttentionSpec, s: SequenceShape) -> int:
    if s.kv_len == 0:
        return s.q_len
    return max(s.q_len - s.kv_len, 0) if spec.causal else 0


def _flops(spec: AttentionSpec, shapes: Iterable[SequenceShape]) -> float:
    pairs = 0.0
    for s in shapes:
        seeing = s.q_len - _dead_tokens(spec, s)
        # The first seeing token sees kv_len - seeing + 1 keys, the last one all.
        pairs += seeing * (s.kv_len - (seeing - 1) / 2 if spec.causal else s.kv_len)
    return 2.0 * (spec.head_dim + spec.v_dim) * spec.num_qo_heads * pairs


def _bytes(spec: AttentionSpec, shapes: Iterable[SequenceShape]) -> float:
    width, total = spec.dtype.itemsize, 0
    for s in shapes:
        seeing = s.q_len - _dead_tokens(spec, s)
        keys = s.kv_len if seeing else 0
        total += keys * spec.num_kv_heads * (spec.head_dim + spec.v_dim) * width + 4 * -(-keys // spec.page_size)
        total += seeing * spec.num_qo_heads * spec.head_dim * width
        total += s.q_len * spec.num_qo_heads * (spec.v_dim * width + 4)
    return float(total)


def describe(p: Picture, rates_known: bool = True) -> Iterator[str]:
    """Lines for people: items and cuts of each list, balance, rows without keys, predicted time and roofline. Times are
    left out where the machine's rates are not the device's."""
    for one in p.lists:
        cut = f", {one.cut_tiles} tiles cut into {one.parts} parts" if one.parts else ", no tile cut"
        empty = f", {one.empty} empty places" if one.empty else ""
        storing = f", {one.storing} only store" if one.storing else ""
        items = f"{len(one.spans)} items of {one.block_m} rows{storing}{cut}{empty}"
        yield f"{one.name:10}{items}, {one.workers} workers"
        if one.longest_keys:
            ratio = f"{one.longest_over_ideal:.2f}x a worker's mean load of {one.ideal_keys:.{_places(one)}f}"
            yield f"{'balance':10}longest item {one.longest_keys} keys, {ratio}; workers busy {100 * one.busy:.0f} %"
    share = 100 * p.dead_rows / p.rows if p.rows else 0.0
    yield f"{'rows':10}{p.rows} (token, query head), {share:.1f} % see no key"
    if rates_known:
        what = "compute" if p.compute_seconds >= p.memory_seconds else "memory"
        reached = 100 * p.bound_seconds / p.seconds if p.seconds else 100.0
        rates = f"{p.machine.flops_per_s / 1e12:.3g} TFLOP/s, {p.machine.bytes_per_s / 1e9:.4g} GB/s"
        yield f"{'predicted':10}{_duration(p.seconds)} without planning, {reached:.0f} % of the roofline"
        yield f"{'roofline':10}{_duration(p.bound_seconds)}, bound by {what} ({rates})"


def _places(one: ListPicture) -> int:
    return 0 if one.ideal_keys >= 10 else 2


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
