"""Ring of operand tiles of a product in clusters: where tiles lie, who asks, products of a step.

    x      tiles [BLOCK_M, 64]        weight      tiles [BLOCK_N, 64]

One buffer holds SLOTS steps of both, BLOCKS tiles of each a step; the larger operand's tiles come
first, so that all begin at multiples of 1 KiB. The first filling is asked for by two or four warps,
and may be shared by a cluster (_triton/tile_copies.py). A slot is filled again, where a program has
more steps than slots, once all its warps have read it; each program asks for its own: shared
fillings had to wait for other programs' reads and took fc2 of 1,568 x 512 from 9.5 us to 10.3 and
more.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from fastswin._triton.cluster_memory import expect_more_bytes
from fastswin._triton.tile_copies import ask_again


@gluon.constexpr_function
def parameter(place):
    """The name that a descriptor has in PTX, which begins with the kernel's.

    It is five parameters: itself, then its two sizes and two strides.
    """
    return f"_cluster_linear_kernel_param_{place}"


X, WEIGHT = gl.constexpr(1), gl.constexpr(6)


@gluon.constexpr_function
def first_tile(ROWS, OTHER_ROWS, COUNT, X):
    """Number of an operand's first tile, all tiles being of its ROWS rows.

    The larger tiles come first, COUNT of them, and x's of two equal ones.
    """
    behind = OTHER_ROWS > ROWS or (OTHER_ROWS == ROWS and not X)
    return COUNT * OTHER_ROWS // ROWS if behind else 0


@gluon.jit
def ring_tiles(
    x_desc, weight_desc, COUNT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """One buffer as tiles of x and of the weight; :func:`first_tile` says which are whose."""
    LARGE: gl.constexpr = BLOCK_N if BLOCK_N > BLOCK_M else BLOCK_M
    SMALL: gl.constexpr = BLOCK_M if BLOCK_N > BLOCK_M else BLOCK_N
    ALL: gl.constexpr = (COUNT * (LARGE + SMALL) + LARGE - 1) // LARGE
    dtype: gl.constexpr = x_desc.dtype
    if BLOCK_N > BLOCK_M:
        weights = gl.allocate_shared_memory(dtype, [ALL, LARGE, 64], weight_desc.layout)
        return weights._reinterpret(
            dtype, [ALL * LARGE // SMALL, SMALL, 64], x_desc.layout
        ), weights
    else:
        rows = gl.allocate_shared_memory(dtype, [ALL, LARGE, 64], x_desc.layout)
        return rows, rows._reinterpret(dtype, [ALL * LARGE // SMALL, SMALL, 64], weight_desc.layout)


@gluon.constexpr_function
def asking_warps(ROWS):
    """Warps that ask for tiles: few large ones come in order, small ones cost as much to ask."""
    return 2 if ROWS == 128 else 4


@gluon.jit
def multiply_step(
    acc, x_tiles, weight_tiles, SLOT: gl.constexpr, SLOTS: gl.constexpr, BLOCKS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """``acc`` plus a step's products, started and not waited for."""
    X_FIRST: gl.constexpr = first_tile(BLOCK_M, BLOCK_N, SLOTS * BLOCKS, True)
    WEIGHT_FIRST: gl.constexpr = first_tile(BLOCK_N, BLOCK_M, SLOTS * BLOCKS, False)
    for block in gl.static_range(BLOCKS):
        x = x_tiles.index(X_FIRST + SLOT * BLOCKS + block)
        weight = weight_tiles.index(WEIGHT_FIRST + SLOT * BLOCKS + block)
        if BLOCK_M < 64:
            acc = warpgroup_mma(weight, x.permute((1, 0)), acc, is_async=True)
        else:
            acc = warpgroup_mma(x, weight.permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def fill_again(
    x_desc, weight_desc, row, col, k, x_at, weight_at, ready, STEP: gl.constexpr,
    SLOTS: gl.constexpr, BLOCKS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Both operands of a step into a slot that all warps have read."""
    SLOT: gl.constexpr = STEP % SLOTS
    tiles: gl.constexpr = x_desc.block_type.nbytes + weight_desc.block_type.nbytes
    expect_more_bytes(ready + 8 * SLOT, BLOCKS * tiles)
    ask_again(
        weight_desc, col, k, weight_at, ready, parameter(WEIGHT), STEP, SLOT, BLOCKS,
        WARPS - BLOCKS,
    )  # fmt: skip
    ask_again(x_desc, row, k, x_at, ready, parameter(X), STEP, SLOT, BLOCKS, 0)
