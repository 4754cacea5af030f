"""Statistics of rows as one product leaves them for the LayerNorm behind another (ops/linear).

stats [2, PARTS, rows] fp32: mean, and sum of squared deviations from it, of equal parts of a row
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def joined_stats(stats_ptr, row, valid, M, eps, K: tl.constexpr, PARTS: tl.constexpr):
    """Mean and 1 / deviation of rows of K values, from those of PARTS equal parts of each.

    Means of parts are added around the first one's, so that a large mean does not cancel.
    """
    at = stats_ptr + row
    pivot = tl.load(at, mask=valid, other=0.0)
    squares = tl.load(at + PARTS * M, mask=valid, other=0.0)
    shift = pivot - pivot
    between = shift
    for part in tl.static_range(1, PARTS):
        d = tl.load(at + part * M, mask=valid, other=0.0) - pivot
        shift += d
        between += d * d
        squares += tl.load(at + (PARTS + part) * M, mask=valid, other=0.0)
    shift = shift / PARTS
    between = tl.maximum(between / PARTS - shift * shift, 0.0)
    return pivot + shift, 1.0 / tl.sqrt(squares / K + between + eps)
