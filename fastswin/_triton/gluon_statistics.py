"""Statistics of rows of tall tiles, left by one product for the LayerNorm behind another.

    stats [2, PARTS, rows] fp32: mean, and sum of squared deviations from it, of parts of a row

:func:`~fastswin._triton.row_statistics.load_stats` with a row's parts shared by the threads that
share the row, so that of 12 parts a thread loads 4, which then add up across lanes. Tiles of 128
rows gain by it (Swin-L at 384 pixels 0.9 %), smaller ones lose as much.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def part_columns(PARTS):
    """Columns of a tile of parts: a power of two, 8 at least as a product's tile has."""
    return max(8, 1 << (PARTS - 1).bit_length())


@gluon.jit
def load_parts(
    stats_ptr, row, valid, M, PARTS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Means and squares of all parts, ``[rows, COLUMNS]`` each, 0 where there is none.

    Args:
        stats_ptr, M: statistics of M rows.
        row, valid: which rows, and whether there are such; of LAYOUT without its columns.
    """
    part = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    at = stats_ptr + part[None, :] * M + row[:, None]
    known = (part < PARTS)[None, :] & valid[:, None]
    return gl.load(at, mask=known, other=0.0), gl.load(at + PARTS * M, mask=known, other=0.0)


@gluon.jit
def join_parts(
    means, squares, eps, K: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr,
    LAYOUT: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Mean and 1 / deviation of rows of K values, in the layout ROWS, which has each row where
    LAYOUT has it."""
    part = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    mean = gl.sum(means, 1) / PARTS
    d = gl.where((part < PARTS)[None, :], means - mean[:, None], 0.0)
    variance = (gl.sum(squares, 1) + gl.sum(d * d, 1) * (K // PARTS)) / K
    rstd = gl.rsqrt(variance + eps)
    return (
        gl.convert_layout(mean, ROWS, assert_trivial=True),
        gl.convert_layout(rstd, ROWS, assert_trivial=True),
    )
