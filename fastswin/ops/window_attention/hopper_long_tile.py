"""Attention of 64 queries of a window of 129 to 160 tokens, for Hopper kernels of one head.

    q [64, 32], scaled   k, v [64], [64] and [NP - 128] rows of 32, in shared memory
    tables [64, 64], [64, 64] and [64, NP - 128], base 2   ->   softmax(q k' + table) v

Four warps; whole rows of scores stay in registers, as in hopper_tile.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from fastswin._triton.gluon_tiles import accumulator
from fastswin.ops.window_attention.hopper_tile import HEAD, operand


@gluon.jit
def _largest(s, rows: gl.constexpr):
    """Largest score of each row."""
    return gl.convert_layout(gl.max(s, 1), rows, assert_trivial=True)


@gluon.jit
def _weights(s, largest, dtype: gl.constexpr, rows: gl.constexpr):
    """Weights as a first operand, and their sums."""
    KEYS: gl.constexpr = s.shape[1]
    around: gl.constexpr = gl.SliceLayout(1, accumulator(KEYS))
    p = gl.exp2(s - gl.convert_layout(largest, around, assert_trivial=True)[:, None])
    total = gl.convert_layout(gl.sum(p, 1), rows, assert_trivial=True)
    return gl.convert_layout(p.to(dtype), operand(KEYS), assert_trivial=True), total


@gluon.jit
def attend_long(q, k0, k1, k2, v0, v1, v2, table0, table1, table2, dtype: gl.constexpr):
    """Softmax attention of 64 queries, ``[64, 32]`` fp32."""
    acc: gl.constexpr = accumulator(HEAD)
    rows: gl.constexpr = gl.SliceLayout(1, acc)
    s0 = warpgroup_mma(q, k0.permute((1, 0)), table0.to(gl.float32), is_async=True)
    s1 = warpgroup_mma(q, k1.permute((1, 0)), table1.to(gl.float32), is_async=True)
    s2 = warpgroup_mma(q, k2.permute((1, 0)), table2.to(gl.float32), is_async=True)
    s0, s1, s2 = warpgroup_mma_wait(0, deps=(s0, s1, s2))
    largest = gl.maximum(gl.maximum(_largest(s0, rows), _largest(s1, rows)), _largest(s2, rows))
    p0, total0 = _weights(s0, largest, dtype, rows)
    p1, total1 = _weights(s1, largest, dtype, rows)
    p2, total2 = _weights(s2, largest, dtype, rows)
    o = gl.zeros([64, HEAD], gl.float32, acc)
    o = warpgroup_mma(p0, v0, o, is_async=True)
    o = warpgroup_mma(p1, v1, o, is_async=True)
    o = warpgroup_mma(p2, v2, o, is_async=True)
    inverse = 1.0 / (total0 + total1 + total2)
    o = warpgroup_mma_wait(0, deps=(o,))
    return o * inverse[:, None]
