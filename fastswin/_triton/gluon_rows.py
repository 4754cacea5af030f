"""Rows of a product's tiles in Gluon, held as column parts: vectors laid over them, LayerNorm.

A row of 96 or 192 channels is no power of two and no tile; it is held as parts ``[64, WIDTH]`` of
the accumulator's layout, each thread with its values of all of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastswin._triton.gluon_tiles import accumulator


@gluon.constexpr_function
def row_layout():
    """Layout of a vector's values in shared memory as rows of a tile."""
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


@gluon.jit
def from_row(vectors, at, COLUMNS: gl.constexpr):
    """A vector's values as every row of a product's tile."""
    acc: gl.constexpr = accumulator(COLUMNS)
    row, _ = gl.broadcast(vectors.index(at).load(acc), gl.zeros([64, COLUMNS], gl.float32, acc))
    return row


@gluon.jit
def _moments(values, C: gl.constexpr):
    """Mean and variance of rows in parts; parts are added up before threads exchange sums."""
    total = values[0]
    for part in gl.static_range(1, len(values)):
        total = total + values[part]
    mean = gl.sum(total, 1) / C
    d = values[0] - mean[:, None]
    squares = d * d
    for part in gl.static_range(1, len(values)):
        d = values[part] - mean[:, None]
        squares = squares + d * d
    return mean, gl.sum(squares, 1) / C


@gluon.jit
def normalized(values, eps, C: gl.constexpr):
    """LayerNorm without affine of rows in parts, the mean first so that offsets do not cancel."""
    mean, variance = _moments(values, C)
    rstd = gl.rsqrt(variance + eps)
    normed = ()
    for part in gl.static_range(len(values)):
        normed += ((values[part] - mean[:, None]) * rstd[:, None],)
    return normed
