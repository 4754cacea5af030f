"""Window attention of one head of 32 channels, for Hopper kernels that hold its q, k and v.

    q, k, v [64, 32] fp32   table [64, 64], base 2 (packing.py)   ->   softmax(q k' scale + table) v

Four warps; 64 rows are those of a tensor-core product, of which a window fills N. Scores stay in
registers: the layout that one product leaves is the one in which the next takes its first operand.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastswin._triton.gluon_tiles import accumulator

#: Channels of a head.
HEAD = gl.constexpr(32)


@gluon.constexpr_function
def operand(COLUMNS):
    """Layout of a first operand of so many columns, thread by thread that of the product."""
    return gl.DotOperandLayout(0, accumulator(COLUMNS), 2)


@gluon.jit
def vector_row(ptr, first, COLUMNS: gl.constexpr):
    """``COLUMNS`` values of an fp32 vector as a row of a product's tile."""
    at = gl.arange(0, COLUMNS, gl.SliceLayout(0, accumulator(COLUMNS)))
    return gl.load(ptr + first + at)[None, :]


@gluon.jit
def inverse_norm(x):
    """``1 / max(||x||, 1e-12)`` of each row."""
    return 1.0 / gl.maximum(gl.sqrt(gl.sum(x * x, 1)), 1e-12)


@gluon.jit
def attend(q, k, v, k_buffer, v_buffer, table, scale, dtype: gl.constexpr, COSINE: gl.constexpr):
    """Softmax attention of one head, ``[64, 32]`` fp32.

    The table's -inf hides keys behind the window, whose rows of k and v have to be finite.
    """
    rows: gl.constexpr = gl.SliceLayout(1, accumulator(HEAD))
    # q, half as wide as the scores, takes the scale; their product starts as the table
    if COSINE:
        q = q * (inverse_norm(q) * scale)[:, None]
        k = k * inverse_norm(k)[:, None]
    else:
        q = q * scale
    k_buffer.store(k.to(dtype))
    v_buffer.store(v.to(dtype))
    q = gl.convert_layout(q.to(dtype), operand(HEAD), assert_trivial=True)
    fence_async_shared()
    s = warpgroup_mma(q, k_buffer.permute((1, 0)), table.to(gl.float32), is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    p = gl.exp2(s - gl.max(s, 1)[:, None])
    inverse = gl.convert_layout(1.0 / gl.sum(p, 1), rows, assert_trivial=True)
    p = gl.convert_layout(p.to(dtype), operand(64), assert_trivial=True)
    o = gl.zeros([64, HEAD], gl.float32, accumulator(HEAD))
    o = warpgroup_mma(p, v_buffer, o, is_async=True)
    o = warpgroup_mma_wait(0, deps=(o,))
    return o * inverse[:, None]
