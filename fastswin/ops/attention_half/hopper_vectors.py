"""What Hopper kernels of one head add behind its projections, in shared memory.

vectors [6, 1, 32]   bias of q, k and v, then the sums of their weights' rows (packing.py)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastswin._triton.gluon_tiles import accumulator
from fastswin.ops.window_attention.hopper_tile import HEAD, vector_row


@gluon.jit
def keep_vectors(vectors, vectors_ptr, column, C: gl.constexpr):
    """A head's vectors into shared memory.

    All are on their way before the first is stored: two stores into one buffer are synchronised,
    so that a load behind each would take L2's time six times.
    """
    rows = ()
    for part in gl.static_range(6):
        rows += (vector_row(vectors_ptr, part * C + column, HEAD),)
    for part in gl.static_range(6):
        vectors.index(part).store(rows[part])


@gluon.jit
def projected(acc, vectors, PART: gl.constexpr, mean, rstd, NORMALIZE: gl.constexpr):
    """Behind a product: LayerNorm by its rows' statistics, and the bias."""
    if NORMALIZE:
        sums = vectors.index(3 + PART).load(accumulator(HEAD))
        acc = (acc - mean[:, None] * sums) * rstd[:, None]
    return acc + vectors.index(PART).load(accumulator(HEAD))
