"""What a program does with a finished tile: statistics of whole rows in a cluster, and the store.

y [BLOCK_M / SPLITS, BLOCK_N] fp32     places: 8 bytes a row of each of the cluster's tiles
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastswin._triton.cluster_memory import (
    joined_statistics,
    part_statistics,
    send_statistics,
    wait_bytes,
)


@gluon.jit
def row_statistics(
    y, places, barrier, tile, part, row, eps, N: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Mean and 1 / deviation of whole rows, of which each program of a cluster has BLOCK_N columns.

    Programs with the same rows, one a tile, tell each other theirs at ``places`` of their memory.
    """
    ROWS: gl.constexpr = BLOCK_M // SPLITS
    TILES: gl.constexpr = N // BLOCK_N
    WARPS: gl.constexpr = BLOCK_M // 16 if SPLITS > BLOCK_M // 16 else SPLITS
    mean, deviations = part_statistics(y, BLOCK_N)
    for other in gl.static_range(TILES):
        send_statistics(
            mean, deviations, places + tile * (8 * ROWS), barrier, other * SPLITS + part, row, ROWS,
            WARPS,
        )  # fmt: skip
    wait_bytes(barrier)
    return joined_statistics(places, row, eps, BLOCK_N, TILES, 8 * ROWS)


@gluon.constexpr_function
def wide_layout(COLUMNS, WARPS):
    """Layout in which a thread has 16 bytes of a row."""
    return gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [WARPS, 1], [1, 0])


@gluon.jit
def store_tile(out_ptr, tile, row0, col0, M, N: gl.constexpr, WARPS: gl.constexpr):
    """A tile as tensor cores leave it, by 16 bytes a thread.

    As it is a warp would store 4 bytes a thread in 8 rows at once: a cycle for each row.
    """
    layout: gl.constexpr = wide_layout(tile.shape[1], WARPS)
    row = row0 + gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    col = col0 + gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    to = out_ptr + row[:, None] * N + col[None, :]
    gl.store(to, gl.convert_layout(tile, layout), mask=(row < M)[:, None])
