"""Tiles of Hopper kernels in Gluon: shared memory, barriers, a product's layout in registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait


@gluon.constexpr_function
def accumulator(COLUMNS, ROWS=64, ACROSS=1):
    """Layout of what a warp for 16 rows each, ACROSS side by side, makes of so many columns."""
    return gl.NVMMADistributedLayout([3, 0], [ROWS // 16, ACROSS], [16, COLUMNS // ACROSS, 16])


@gluon.jit
def buffers(desc, COUNT: gl.constexpr):
    """Shared memory for ``COUNT`` tiles of a descriptor."""
    shape: gl.constexpr = [COUNT] + desc.block_type.shape  # noqa: RUF005
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers in shared memory, of so many arrivals each."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def in_registers(sums):
    """First values of sums, each in registers of its own; no product may be under way.

    Values that the compiler wrote there, or copied, between products would make the assembler
    serialize all of them (docs/performance.md).
    """
    return warpgroup_mma_wait(0, deps=sums)
