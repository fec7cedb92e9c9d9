"""TMA descriptors of K/V caches, encoded by the CUDA driver and kept in device memory."""

import ctypes
import functools
from collections.abc import Hashable
from typing import Any

import torch

from octavo.backends.launch import current_stream, kept
from octavo.shapes import Tensor

RUNS_NEVER, RUNS_FLAT, RUNS_IN_PAGE = 0, 1, 2
"""Where rows that one box can hold lie: nowhere; anywhere in the cache, seen as one list of keys; within a page."""

MIN_ROWS, MAX_ROWS, BOX_COLUMNS = 16, 32, 64  # MAX_ROWS: a warp's share of a tile; columns: 128 bytes, the swizzle's
MAP_BYTES, MAPS_AT_A_TIME, MAX_MAPS = 128, 2048, 1 << 16
_DATA_TYPES = {torch.bfloat16: 9, torch.float16: 6}
_SWIZZLE_128B, _PROMOTE_TO_256B = 3, 3


def run_form(cache: Tensor) -> int:
    """RUNS_* of one cache [pages, page_size, kv_heads, dim]."""
    _, page_size, _, _ = cache.shape
    page_stride, token_stride = cache.stride()[:2]
    if page_size == 1 or page_stride == page_size * token_stride:
        return RUNS_FLAT
    return RUNS_IN_PAGE if page_size % MIN_ROWS == 0 else RUNS_NEVER


def box_rows(page_size: int) -> int:
    """Keys in a box: as many as every page of this size holds, or a warp's share where only runs of pages hold them."""
    return MIN_ROWS if page_size % MAX_ROWS and page_size % MIN_ROWS == 0 else MAX_ROWS


class _Pair:
    """Descriptors of K and V in device memory, the bytes they are copied from, and when they have arrived."""

    def __init__(self, maps: Tensor, encoded: bytes) -> None:
        self.maps, self.words = maps, torch.frombuffer(bytearray(encoded), dtype=torch.uint8).pin_memory()
        self.stream, self.arrived = current_stream(maps.get_device()), torch.cuda.Event()
        self.is_there = False
        maps.copy_(self.words, non_blocking=True)
        self.arrived.record(torch.cuda.current_stream(maps.device))

    def on_current_stream(self) -> Tensor:
        """The descriptors, which work of the current stream finds written."""
        if not self.is_there and current_stream(self.maps.get_device()) != self.stream:
            self.is_there = self.arrived.query()
            if not self.is_there:
                torch.cuda.current_stream(self.maps.device).wait_event(self.arrived)
        return self.maps


class TensorMaps:
    """Pairs of descriptors by what they describe. A descriptor is a pure function of its key, so none grows stale.

    None is freed either: a captured graph may hold its address. 256 bytes a pair, MAX_MAPS pairs at most.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Pair] = {}
        self._room: dict[torch.device, list[Tensor]] = {}

    def find(self, k_cache: Tensor, v_cache: Tensor, form: int) -> Tensor | None:
        """Descriptors of K and V, 128 bytes each, for work of the current stream.

        None where the driver refuses the layout, MAX_MAPS are in use, or a graph is being captured and the caches were
        not met before: run once before capturing. Known descriptors that a capture takes must have been written when
        the graph is replayed; torch.cuda.graph synchronises when it begins.
        """
        looks = ((x.data_ptr(), x.dtype, x.shape, x.stride()) for x in (k_cache, v_cache))
        key = (k_cache.device, form, *looks)
        pair, capturing = self._known.get(key), torch.cuda.is_current_stream_capturing()
        if pair is not None:
            return pair.maps if capturing else pair.on_current_stream()
        if capturing or len(self._known) >= MAX_MAPS:
            return None
        encoded = [_encode(x, form) for x in (k_cache, v_cache)]
        if encoded[0] is None or encoded[1] is None:
            return None
        pair = self._known[key] = _Pair(self._take(k_cache.device), encoded[0] + encoded[1])
        return pair.maps

    def _take(self, device: torch.device) -> Tensor:
        room = self._room.setdefault(device, [])
        if not room:
            shape = (MAPS_AT_A_TIME, 2 * MAP_BYTES)
            room += kept(lambda: torch.empty(shape, dtype=torch.uint8, device=device), device).unbind()
        return room.pop()


def _encode(cache: Tensor, form: int) -> bytes | None:
    """The driver's descriptor of boxes (box_rows keys x 64 columns) in a tensor (column, key, head, page)."""
    pages, page_size, heads, dim = cache.shape
    page_stride, token_stride, head_stride = cache.stride()[:3]
    if page_size == 1:
        token_stride = page_stride
    flat = form == RUNS_FLAT
    shape = (dim, pages * page_size if flat else page_size, heads, 1 if flat else pages)
    strides = [2 * token_stride, 2 * (head_stride if heads > 1 else dim), 2 * page_stride]
    raw = ctypes.create_string_buffer(MAP_BYTES + 64)
    place = ctypes.c_void_p(-(-ctypes.addressof(raw) // 64) * 64)
    failed = _driver().cuTensorMapEncodeTiled(
        place,
        _DATA_TYPES[cache.dtype],
        4,
        ctypes.c_void_p(cache.data_ptr()),
        (ctypes.c_uint64 * 4)(*shape),
        (ctypes.c_uint64 * 3)(*strides),
        (ctypes.c_uint32 * 4)(BOX_COLUMNS, box_rows(page_size), 1, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        0,
        _SWIZZLE_128B,
        _PROMOTE_TO_256B,
        0,
    )
    return None if failed else ctypes.string_at(place, MAP_BYTES)


@functools.lru_cache(maxsize=1)
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
