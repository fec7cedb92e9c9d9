"""Gluon under one set of names: what Triton 3.6 and later call differently."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.language import core

aggregate = getattr(gluon, "aggregate", None) or core._aggregate

partition_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Synchronises the threads of one warp-specialised partition."""

fence_async_shared = hopper.fence_async_shared
mbarrier = hopper.mbarrier
warpgroup_mma = hopper.warpgroup_mma
warpgroup_mma_wait = hopper.warpgroup_mma_wait

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """The same shared memory as another type, shape and layout of the same size: Triton 3.8 takes no other."""
        return memory.reinterpret(dtype, shape, layout)

else:

    @gluon.jit
    def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """The same shared memory as another type, shape and layout of the same size: Triton 3.8 takes no other."""
        return memory._reinterpret(dtype, shape, layout)


__all__ = [
    "aggregate",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "partition_barrier",
    "reinterpret",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
