"""Statistics of rows as one product leaves them for the LayerNorm behind another (ops/linear).

stats [2, PARTS, rows] fp32: mean, and sum of squared deviations from it, of equal parts of a row
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_stats(stats_ptr, row, valid, M, PARTS: tl.constexpr, FIRST: tl.constexpr = 0):
    """Means and squares of all parts of rows, one tensor each, for :func:`join_stats`.

    A kernel that joins them behind its products does not wait for them in front, which took 0.9 to
    1.7 us of a launch at batch 1 (H200, docs/performance.md).
    """
    at = stats_ptr + FIRST * M + row
    mean = tl.load(at, mask=valid, other=0.0)
    squares = tl.load(at + PARTS * M, mask=valid, other=0.0)
    if FIRST + 1 == PARTS:
        return (mean,), (squares,)
    else:
        more = load_stats(stats_ptr, row, valid, M, PARTS, FIRST + 1)
        return (mean,) + more[0], (squares,) + more[1]


@triton.jit
def join_stats(means, squares, eps, K: tl.constexpr, PARTS: tl.constexpr):
    """Mean and 1 / deviation of rows of K values, from those of PARTS equal parts of each.

    Means of parts are added around the first one's, so that a large mean does not cancel.
    """
    pivot, within = means[0], squares[0]
    shift = pivot - pivot
    between = shift
    for part in tl.static_range(1, PARTS):
        d = means[part] - pivot
        shift += d
        between += d * d
        within += squares[part]
    shift = shift / PARTS
    between = tl.maximum(between / PARTS - shift * shift, 0.0)
    return pivot + shift, 1.0 / tl.sqrt(within / K + between + eps)


@triton.jit
def joined_stats(stats_ptr, row, valid, M, eps, K: tl.constexpr, PARTS: tl.constexpr):
    """:func:`join_stats` of what :func:`load_stats` has just loaded."""
    means, squares = load_stats(stats_ptr, row, valid, M, PARTS)
    return join_stats(means, squares, eps, K, PARTS)
