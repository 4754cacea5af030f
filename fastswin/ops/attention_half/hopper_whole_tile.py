"""What hopper_whole.py computes of a window in registers: its norms, and products with weights.

    x [64, C] in column parts [64, WIDTH], operands of products; sums the same in fp32
    weights: tiles [32, WIDTH] of outputs of qkv, by column part, and [WIDTH, 32] of proj, by head

All for four warps; a row lies in four threads. ``vectors`` are packing.py's, as rows in shared
memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from fastswin._triton.gluon_rows import from_row, normalized
from fastswin._triton.gluon_tiles import accumulator, in_registers
from fastswin.ops.window_attention.hopper_tile import HEAD, operand

#: Weight rows of a copy, and copies that hold the 3C outputs of a column part of qkv.
BLOCK = gl.constexpr(128)
BLOCKS = gl.constexpr(3)


@gluon.jit
def project(x, weights, vectors, head, NH: gl.constexpr):
    """q, k and v of a head on top of their biases, under way."""
    q = from_row(vectors, head, HEAD)
    k = from_row(vectors, NH + head, HEAD)
    v = from_row(vectors, 2 * NH + head, HEAD)
    q, k, v = in_registers((q, k, v))
    for part in gl.static_range(len(x)):
        at = part * (BLOCKS * BLOCK // HEAD) + head
        q = warpgroup_mma(x[part], weights.index(at).permute((1, 0)), q, is_async=True)
        k = warpgroup_mma(x[part], weights.index(at + NH).permute((1, 0)), k, is_async=True)
        v = warpgroup_mma(x[part], weights.index(at + 2 * NH).permute((1, 0)), v, is_async=True)
    return q, k, v


@gluon.jit
def project_back(o, proj, head, sums, WIDTH: gl.constexpr):
    """A head's part of proj, under way."""
    more = ()
    for part in gl.static_range(len(sums)):
        tile = proj.index(head * (BLOCK // WIDTH) + part)
        more += (warpgroup_mma(o, tile.permute((1, 0)), sums[part], is_async=True),)
    return more


@gluon.jit
def begin_sums(
    x, vectors, eps, dtype: gl.constexpr, C: gl.constexpr, WIDTH: gl.constexpr,
    NORM_FIRST: gl.constexpr,
):  # fmt: skip
    """What heads multiply, and what their sums start from: proj's bias and V1's residual."""
    acc: gl.constexpr = accumulator(WIDTH)
    sums = ()
    for part in gl.static_range(len(x)):
        sums += (from_row(vectors, 3 * C // WIDTH + part, WIDTH),)
    if NORM_FIRST:
        wide = ()
        for part in gl.static_range(len(x)):
            wide += (gl.convert_layout(x[part], acc, assert_trivial=True).to(gl.float32),)
        normed = normalized(wide, eps, C)
        rows = ()
        with_rows = ()
        for part in gl.static_range(len(x)):
            n = normed[part].to(dtype)
            rows += (gl.convert_layout(n, operand(WIDTH), assert_trivial=True),)
            with_rows += (sums[part] + wide[part],)
        x = rows
        sums = with_rows
    return x, sums


@gluon.jit
def end_sums(x, sums, vectors, eps, C: gl.constexpr, WIDTH: gl.constexpr, NORM_FIRST: gl.constexpr):
    """Rows of the output: the sums, of V2 their norm and the residual."""
    acc: gl.constexpr = accumulator(WIDTH)
    if not NORM_FIRST:
        normed = normalized(sums, eps, C)
        results = ()
        for part in gl.static_range(len(sums)):
            y = normed[part] * vectors.index(4 * C // WIDTH + part).load(acc)
            y = y + vectors.index(5 * C // WIDTH + part).load(acc)
            wide = gl.convert_layout(x[part], acc, assert_trivial=True).to(gl.float32)
            results += (y + wide,)
        sums = results
    return sums
