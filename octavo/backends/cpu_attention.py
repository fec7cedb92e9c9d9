"""Attention on the CPU as jobs: each sequence's pages read once, then its tiles of query rows, largest first."""

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from octavo.backends.base import AttentionCall
from octavo.backends.cpu_pages import KEY_MULTIPLE, PageReader, SequencePages, sequences_of
from octavo.backends.cpu_threads import WORKERS, Job, run_jobs
from octavo.backends.cpu_tiles import Tile, Tiles
from octavo.errors import fail
from octavo.shapes import Tensor

SMALL_WORK = 1 << 20
"""Nanoseconds of work, about, for which a second thread is not woken."""


def attend(call: AttentionCall) -> None:
    """Write call.out and call.lse completely."""
    sequences = sequences_of(call.batch, call.spec.page_size)
    end = sequences[-1].start + sequences[-1].q_len if sequences else 0
    if end > call.q.shape[0]:
        fail("qo_indptr", f"at most {call.q.shape[0]} (rows of q) last", end, "pad q")
    live = [s for s in sequences if s.live_rows(call.spec.causal)]
    jobs = _Jobs(call, live)
    for s in sequences:
        jobs.tiles.write_empty(s.start, s.start + s.q_len - s.live_rows(call.spec.causal))
    jobs.tiles.write_empty(end, call.q.shape[0])
    live.sort(key=jobs.work, reverse=True)
    at_once = WORKERS if sum(map(jobs.work, live)) > SMALL_WORK else 1
    run_jobs([partial(jobs.open, s) for s in live], at_once)


class _Keys:
    """K and V of one sequence at a time, as [1, kv_heads, keys, dim], and how many jobs still need them."""

    def __init__(self, call: AttentionCall, max_keys: int, dim: int) -> None:
        self.readers = [PageReader(x, max_keys, dim) for x in (call.k_cache, call.v_cache)]
        self.read: list[Tensor] = [call.k_cache, call.v_cache]
        self.not_finite: list[int] = []
        self.needed, self._lock = 0, threading.Lock()

    def last(self) -> bool:
        """Count a job that has ended. Whether it was the last that needs them."""
        with self._lock:
            self.needed -= 1
            return not self.needed


class _Jobs:
    """What one call has to do. Only sequences with rows that see a key."""

    def __init__(self, call: AttentionCall, sequences: Sequence[SequencePages]) -> None:
        spec = call.spec
        self.causal, self.score_heads = spec.causal, spec.num_qo_heads
        self.read_elements = spec.num_kv_heads * (spec.head_dim + spec.v_dim)
        keys = max((s.num_pages for s in sequences), default=0) * spec.page_size
        self.tiles = Tiles(call, max((s.q_len for s in sequences), default=1), WORKERS)
        # Whoever opens a sequence finds one of these: as further jobs come first, every sequence that is open then
        # has a job that runs.
        self.free = [_Keys(call, keys, self.tiles.dim) for _ in range(WORKERS)]

    def work(self, sequence: SequencePages) -> int:
        """About as many nanoseconds as one thread needs."""
        return sequence.kv_len * (sequence.q_len * self.score_heads + self.read_elements)

    def open(self, sequence: SequencePages) -> Iterable[Job]:
        """All of a short sequence; for a longer one, the jobs that read its keys."""
        keys = self.free.pop()
        keys.not_finite = []
        # K last: it is used first, and in the cache then.
        if sequence.q_len > self.tiles.tokens:
            keys.needed = 2
            return [partial(self._read_and_cut, keys, sequence, i) for i in (1, 0)]
        for i in (1, 0):
            self._read(keys, sequence, i)
        for tile in self._cut(keys, sequence):
            self.tiles.attend(*tile)
        self.free.append(keys)
        return ()

    def _read(self, keys: _Keys, sequence: SequencePages, i: int) -> None:
        """K (0) or V (1) of a sequence."""
        live, length = sequence.live_rows(self.causal), sequence.kv_len
        triangle = self.causal and live > 1
        readable = -(-length // KEY_MULTIPLE) * KEY_MULTIPLE if triangle else length
        keys.read[i] = x = keys.readers[i].read(sequence, readable)
        if triangle:
            keys.not_finite += _not_finite(x[:, :, length - live + 1 :])

    def _read_and_cut(self, keys: _Keys, sequence: SequencePages, i: int) -> Iterable[Job]:
        self._read(keys, sequence, i)
        if not keys.last():
            return ()
        tiles = [partial(self._tile, keys, tile) for tile in self._cut(keys, sequence)]
        keys.needed = len(tiles)
        return tiles[::-1]

    def _tile(self, keys: _Keys, tile: Tile) -> Iterable[Job]:
        self.tiles.attend(*tile)
        if keys.last():
            self.free.append(keys)
        return ()

    def _cut(self, keys: _Keys, sequence: SequencePages) -> Iterator[Tile]:
        live, length, (k, v) = sequence.live_rows(self.causal), sequence.kv_len, keys.read
        first, tokens = sequence.start + sequence.q_len - live, self.tiles.tokens
        # Rows between two keys that are not finite see the same ones of them: no row meets one that it does not see.
        for begin, end in pairwise([0, *sorted(set(keys.not_finite)), live]):
            if keys.not_finite:
                k, v = (x[:, :, : length - live + end] for x in keys.read)
            for low in range(begin, end, tokens):
                high = min(low + tokens, end)
                yield first + low, first + high, length - live + high if self.causal else length, k, v


def _not_finite(x: Tensor) -> list[int]:
    """1 + the positions of keys that hold NaN or Inf; a finite sum says at once that there are none."""
    if math.isfinite(float(x.sum())):
        return []
    finite = x.isfinite().all(-1).flatten(0, 1).all(0)
    return [1 + i for i in (~finite).nonzero().flatten().tolist()]
