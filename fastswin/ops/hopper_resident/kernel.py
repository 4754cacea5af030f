"""Narrow rows against weights that stay in shared memory, on Hopper.

    product     y = norm(x + offset) w' + bias                            x [M, C]   w [N, C]
    MLP, V1     out = x' + fc2(gelu(fc1(norm(x')))), x' = x + offset      fc1 [H, C] fc2 [C, H]
    MLP, V2     out = x' + norm(fc2(gelu(fc1(x')))) * weight + bias

A stage of 96 or 128 channels has many rows and weights of 55 to 260 KB. A product's weight, and an
MLP's of 96 channels, fit one multiprocessor: they come once for each program, not once for each row
tile. An MLP's of 128 channels come through a ring, once for a round of tiles. Rows come and leave
through the tensor copy engine; in between they live in registers, where the norm, GELU and the
residual are applied and from where they enter the tensor cores, so that warp groups share nothing
but the weights. A group of four warps takes 64 rows at a time; while one does arithmetic, another's
products have the tensor cores. 2 M C N and 4 M C H FLOPs; M (C + N) and 2 M C values to and from
memory, beside the weights.

Rows are held as two column parts, 64 and C - 64, each a power of two. The last step of a product
whose columns are no multiple of the step begins earlier and computes some columns twice, to the
same bits, so that nothing is masked.

Barriers need no state: the i-th tile of a program is the ``i // GROUPS``-th filling of its group's
buffer, whose parity is the phase to wait for. Weights come once, so their phase is 0 for ever.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastswin._triton.gluon_tiles import accumulator, barriers, buffers, in_registers
from fastswin._triton.math import gelu
from fastswin._triton.pdl import wait_for_previous

#: Rows of a group's tile and channels of the first part of a row.
ROWS = gl.constexpr(64)
PART = gl.constexpr(64)


@gluon.jit
def _vector(ptr, first, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """``COLUMNS`` values of a vector from ``first`` on, in fp32, as a row of tiles of a layout."""
    at = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return gl.load(ptr + first + at).to(gl.float32)[None, :]


@gluon.jit
def _row_means(a, b, C: gl.constexpr, LAYOUT: gl.constexpr):
    """Mean of rows in two parts, laid out as the first part's rows."""
    rows: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    return (gl.sum(a, 1) + gl.convert_layout(gl.sum(b, 1), rows, assert_trivial=True)) / C


@gluon.jit
def _normalize(a, b, C: gl.constexpr, eps, A: gl.constexpr, B: gl.constexpr):
    """LayerNorm without affine, the mean first so that large offsets do not cancel."""
    rows_of_b: gl.constexpr = gl.SliceLayout(1, B)
    mean = _row_means(a, b, C, A)
    a -= mean[:, None]
    b -= gl.convert_layout(mean, rows_of_b, assert_trivial=True)[:, None]
    rstd = gl.rsqrt(_row_means(a * a, b * b, C, A) + eps)
    a *= rstd[:, None]
    b *= gl.convert_layout(rstd, rows_of_b, assert_trivial=True)[:, None]
    return a, b


@gluon.jit
def _operand(tile, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """A tile as first operand of a product; each thread keeps what it holds."""
    layout: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    return gl.convert_layout(tile.to(dtype), layout, assert_trivial=True)


@gluon.jit
def _rows(
    xa, xb, offset_ptr, GROUP: gl.constexpr, HAS_OFFSET: gl.constexpr,
    A: gl.constexpr, B: gl.constexpr,
):  # fmt: skip
    """A group's rows from shared memory, in fp32, plus the offset."""
    a = xa.index(GROUP).load(A).to(gl.float32)
    b = xb.index(GROUP).load(B).to(gl.float32)
    if HAS_OFFSET:
        a += _vector(offset_ptr, 0, a.shape[1], A)
        b += _vector(offset_ptr, a.shape[1], b.shape[1], B)
    return a, b


@gluon.jit
def _load_rows(
    xa_desc, xb_desc, xa, xb, full, empty, count, GROUPS: gl.constexpr, PDL: gl.constexpr
):
    """Row tiles of a program, each into its group's buffer once that has been read."""
    wait_for_previous(PDL)
    for i in range(count):
        group = i % GROUPS
        row = (gl.program_id(0) + i * gl.num_programs(0)) * ROWS
        mbarrier.wait(empty.index(group), (i // GROUPS & 1) ^ 1)
        ready = full.index(group)
        mbarrier.expect(ready, xa_desc.block_type.nbytes + xb_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(xa_desc, [row, 0], ready, xa.index(group))
        tma.async_copy_global_to_shared(xb_desc, [row, PART], ready, xb.index(group))


@gluon.jit
def _load_product(
    xa_desc, xb_desc, wa_desc, wb_desc, xa, xb, wa, wb, full, empty, weights, count, N,
    STEPS: gl.constexpr, GROUPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp of a product: the weight, then rows."""
    BLOCK_N: gl.constexpr = wa_desc.block_type.shape[0]
    for s in range(STEPS):
        col = gl.minimum(s * BLOCK_N, N - BLOCK_N)
        ready = weights.index(s)
        mbarrier.expect(ready, wa_desc.block_type.nbytes + wb_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(wa_desc, [col, 0], ready, wa.index(s))
        tma.async_copy_global_to_shared(wb_desc, [col, PART], ready, wb.index(s))
    _load_rows(xa_desc, xb_desc, xa, xb, full, empty, count, GROUPS, PDL)


@gluon.jit
def _multiply_tiles(
    bias_ptr, offset_ptr, out_desc, xa, xb, wa, wb, staging, full, empty, weights, count, N, eps,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, STEPS: gl.constexpr, BUFFERS: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_OFFSET: gl.constexpr,
):  # fmt: skip
    """A warp group: norm, product and bias of its row tiles."""
    dtype: gl.constexpr = out_desc.dtype
    BLOCK_N: gl.constexpr = out_desc.block_type.shape[1]
    CB: gl.constexpr = xb.shape[2]
    A: gl.constexpr = accumulator(PART)
    B: gl.constexpr = accumulator(CB)
    OUT: gl.constexpr = accumulator(BLOCK_N)
    for i in range(GROUP, count, GROUPS):
        row = (gl.program_id(0) + i * gl.num_programs(0)) * ROWS
        mbarrier.wait(full.index(GROUP), i // GROUPS & 1)
        a, b = _rows(xa, xb, offset_ptr, GROUP, HAS_OFFSET, A, B)
        mbarrier.arrive(empty.index(GROUP), count=1)
        a, b = _normalize(a, b, PART + CB, eps, A, B)
        a = _operand(a, dtype, A)
        b = _operand(b, dtype, B)
        for s in range(STEPS):
            col = gl.minimum(s * BLOCK_N, N - BLOCK_N)
            acc = gl.zeros([ROWS, BLOCK_N], gl.float32, OUT)
            if HAS_BIAS:
                acc += _vector(bias_ptr, col, BLOCK_N, OUT)
            mbarrier.wait(weights.index(s), 0)
            acc = warpgroup_mma(a, wa.index(s).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma(b, wb.index(s).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            buffer = staging.index(GROUP * BUFFERS + (i // GROUPS * STEPS + s) % BUFFERS)
            tma.store_wait(BUFFERS - 1)  # the last store out of the same buffer
            buffer.store(acc.to(dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [row, col], buffer)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "tiles"])
def _resident_product_kernel(
    bias_ptr, offset_ptr, xa_desc, xb_desc, wa_desc, wb_desc, out_desc, N, tiles, eps,
    STEPS: gl.constexpr, GROUPS: gl.constexpr, REGISTERS: gl.constexpr, BUFFERS: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_OFFSET: gl.constexpr, PDL: gl.constexpr = False,
):  # fmt: skip
    """Groups of four warps multiply, the launch's own are the first of them; one warp loads."""
    count = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))
    xa = buffers(xa_desc, GROUPS)
    xb = buffers(xb_desc, GROUPS)
    wa = buffers(wa_desc, STEPS)
    wb = buffers(wb_desc, STEPS)
    staging = buffers(out_desc, GROUPS * BUFFERS)
    full = barriers(GROUPS, 1)
    empty = barriers(GROUPS, 1)
    weights = barriers(STEPS, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply_tiles, (
                bias_ptr, offset_ptr, out_desc, xa, xb, wa, wb, staging, full, empty, weights,
                count, N, eps, part, GROUPS, STEPS, BUFFERS, HAS_BIAS, HAS_OFFSET,
            ))
            if part < GROUPS else
            (_load_product, (
                xa_desc, xb_desc, wa_desc, wb_desc, xa, xb, wa, wb, full, empty, weights, count, N,
                STEPS, GROUPS, PDL,
            ))
            for part in ((0, 1, 2, 3) if GROUPS == 3 else (0, 1, 2, 3, 4))
        ],
        [4, 4, 1] if GROUPS == 3 else [4, 4, 4, 1],
        [REGISTERS, REGISTERS, 24] if GROUPS == 3 else [REGISTERS, REGISTERS, REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def _load_hidden(
    fc1a_desc, fc1b_desc, fc2a_desc, fc2b_desc, fc1a, fc1b, fc2a, fc2b, weights, used, rounds,
    STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads an MLP's weights, step by step: once, or for every round of tiles."""
    BLOCK_H: gl.constexpr = fc1a_desc.block_type.shape[0]
    BYTES: gl.constexpr = fc1a_desc.block_type.nbytes + fc1b_desc.block_type.nbytes
    for step in range(STEPS if STAGES == STEPS else rounds * STEPS):
        slot = step % STAGES
        unit = step % STEPS * BLOCK_H
        if STAGES < STEPS:
            mbarrier.wait(used.index(slot), (step // STAGES & 1) ^ 1)
        ready = weights.index(slot)
        mbarrier.expect(ready, 2 * BYTES)
        tma.async_copy_global_to_shared(fc1a_desc, [unit, 0], ready, fc1a.index(slot))
        tma.async_copy_global_to_shared(fc1b_desc, [unit, PART], ready, fc1b.index(slot))
        tma.async_copy_global_to_shared(fc2a_desc, [0, unit], ready, fc2a.index(slot))
        tma.async_copy_global_to_shared(fc2b_desc, [PART, unit], ready, fc2b.index(slot))


@gluon.jit
def _filling(i, s, STEPS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """Slot and phase of the weights of step ``s`` of tile ``i``."""
    if STAGES == STEPS:
        return s, 0
    else:
        step = i // GROUPS * STEPS + s
        return step % STAGES, step // STAGES & 1


@gluon.jit
def _bias(bias_ptr, s, BLOCK_H: gl.constexpr, LAYOUT: gl.constexpr):
    """fc1's bias of step ``s`` in each row, what its products begin from."""
    bias = _vector(bias_ptr, s * BLOCK_H, BLOCK_H, LAYOUT)
    rows, _ = gl.broadcast(bias, gl.zeros([ROWS, BLOCK_H], gl.float32, LAYOUT))
    return rows


@gluon.jit
def _expand(
    a, b, h, fc1a, fc1b, weights, i, s,
    STEPS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Hidden units of step ``s`` of tile ``i`` on top of their bias, before GELU, under way."""
    slot, phase = _filling(i, s, STEPS, STAGES, GROUPS)
    mbarrier.wait(weights.index(slot), phase)
    h = warpgroup_mma(a, fc1a.index(slot).permute((1, 0)), h, is_async=True)
    return warpgroup_mma(b, fc1b.index(slot).permute((1, 0)), h, is_async=True)


@gluon.jit
def _shrink(h, ya, yb, fc2a, fc2b, slot):
    """Results plus what one step's hidden units add, under way."""
    ya = warpgroup_mma(h, fc2a.index(slot).permute((1, 0)), ya, is_async=True)
    yb = warpgroup_mma(h, fc2b.index(slot).permute((1, 0)), yb, is_async=True)
    return ya, yb


@gluon.jit
def _mlp_tiles(
    fc1_bias_ptr, fc2_bias_ptr, norm_weight_ptr, norm_bias_ptr, offset_ptr, outa_desc, outb_desc,
    xa, xb, fc1a, fc1b, fc2a, fc2b, outa, outb, full, empty, weights, used, count,
    eps, GROUP: gl.constexpr, GROUPS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    POST_NORM: gl.constexpr, HAS_OFFSET: gl.constexpr,
):  # fmt: skip
    """A warp group: the whole MLP of its row tiles; hidden units exist as registers only."""
    dtype: gl.constexpr = outa_desc.dtype
    BLOCK_H: gl.constexpr = fc1a.shape[1]
    CB: gl.constexpr = xb.shape[2]
    A: gl.constexpr = accumulator(PART)
    B: gl.constexpr = accumulator(CB)
    HIDDEN: gl.constexpr = accumulator(BLOCK_H)
    for i in range(GROUP, count, GROUPS):
        row = (gl.program_id(0) + i * gl.num_programs(0)) * ROWS
        mbarrier.wait(full.index(GROUP), i // GROUPS & 1)
        a, b = _rows(xa, xb, offset_ptr, GROUP, HAS_OFFSET, A, B)
        ya = _vector(fc2_bias_ptr, 0, PART, A)
        yb = _vector(fc2_bias_ptr, PART, CB, B)
        if POST_NORM:
            ya += gl.zeros([ROWS, PART], gl.float32, A)
            yb += gl.zeros([ROWS, CB], gl.float32, B)
        else:
            mbarrier.arrive(empty.index(GROUP), count=1)
            ya += a
            yb += b
            a, b = _normalize(a, b, PART + CB, eps, A, B)
        a = _operand(a, dtype, A)
        b = _operand(b, dtype, B)
        h = _bias(fc1_bias_ptr, 0, BLOCK_H, HIDDEN)
        h, ya, yb = in_registers((h, ya, yb))
        h = _expand(a, b, h, fc1a, fc1b, weights, i, 0, STEPS, STAGES, GROUPS)
        h = warpgroup_mma_wait(0, deps=(h,))
        for s in range(STEPS - 1):
            slot, _ = _filling(i, s, STEPS, STAGES, GROUPS)
            units = _operand(gelu(h), dtype, HIDDEN)
            h = _bias(fc1_bias_ptr, s + 1, BLOCK_H, HIDDEN)
            h, ya, yb = in_registers((h, ya, yb))
            ya, yb = _shrink(units, ya, yb, fc2a, fc2b, slot)
            h = _expand(a, b, h, fc1a, fc1b, weights, i, s + 1, STEPS, STAGES, GROUPS)
            h, ya, yb = warpgroup_mma_wait(0, deps=(h, ya, yb))
            if STAGES < STEPS:
                mbarrier.arrive(used.index(slot), count=1)
        slot, _ = _filling(i, STEPS - 1, STEPS, STAGES, GROUPS)
        ya, yb = _shrink(_operand(gelu(h), dtype, HIDDEN), ya, yb, fc2a, fc2b, slot)
        ya, yb = warpgroup_mma_wait(0, deps=(ya, yb))
        if STAGES < STEPS:
            mbarrier.arrive(used.index(slot), count=1)
        if POST_NORM:
            ya, yb = _normalize(ya, yb, PART + CB, eps, A, B)
            ya = ya * _vector(norm_weight_ptr, 0, PART, A) + _vector(norm_bias_ptr, 0, PART, A)
            yb = yb * _vector(norm_weight_ptr, PART, CB, B) + _vector(norm_bias_ptr, PART, CB, B)
            a, b = _rows(xa, xb, offset_ptr, GROUP, HAS_OFFSET, A, B)
            mbarrier.arrive(empty.index(GROUP), count=1)
            ya += a
            yb += b
        tma.store_wait(0)
        outa.index(GROUP).store(ya.to(dtype))
        outb.index(GROUP).store(yb.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(outa_desc, [row, 0], outa.index(GROUP))
        tma.async_copy_shared_to_global(outb_desc, [row, PART], outb.index(GROUP))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles"])
def _resident_mlp_kernel(
    fc1_bias_ptr, fc2_bias_ptr, norm_weight_ptr, norm_bias_ptr, offset_ptr, xa_desc, xb_desc,
    fc1a_desc, fc1b_desc, fc2a_desc, fc2b_desc, outa_desc, outb_desc, tiles, eps,
    STEPS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, REGISTERS: gl.constexpr,
    POST_NORM: gl.constexpr, HAS_OFFSET: gl.constexpr,
    PDL: gl.constexpr = False,
):  # fmt: skip
    """Three groups of four warps compute, the launch's own are the first; two warps load.

    ``out`` may be ``x``: a row is read by the group that writes it, before it does.
    """
    count = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))
    rounds = gl.cdiv(count, GROUPS)
    if STAGES < STEPS:  # every group sees every filling; tiles behind the last row are empty
        count = rounds * GROUPS
    xa = buffers(xa_desc, GROUPS)
    xb = buffers(xb_desc, GROUPS)
    fc1a = buffers(fc1a_desc, STAGES)
    fc1b = buffers(fc1b_desc, STAGES)
    fc2a = buffers(fc2a_desc, STAGES)
    fc2b = buffers(fc2b_desc, STAGES)
    outa = buffers(outa_desc, GROUPS)
    outb = buffers(outb_desc, GROUPS)
    full = barriers(GROUPS, 1)
    empty = barriers(GROUPS, 1)
    weights = barriers(STAGES, 1)
    used = weights  # a barrier that nobody uses would share its memory with something else
    if STAGES < STEPS:
        used = barriers(STAGES, GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_mlp_tiles, (
                fc1_bias_ptr, fc2_bias_ptr, norm_weight_ptr, norm_bias_ptr, offset_ptr, outa_desc,
                outb_desc, xa, xb, fc1a, fc1b, fc2a, fc2b, outa, outb, full, empty, weights, used,
                count, eps, part, GROUPS, STEPS, STAGES, POST_NORM, HAS_OFFSET,
            ))
            if part < GROUPS else
            (_load_rows, (xa_desc, xb_desc, xa, xb, full, empty, count, GROUPS, PDL))
            if part == GROUPS else
            (_load_hidden, (
                fc1a_desc, fc1b_desc, fc2a_desc, fc2b_desc, fc1a, fc1b, fc2a, fc2b, weights, used,
                rounds, STEPS, STAGES,
            ))
            for part in (0, 1, 2, 3, 4)
        ],
        [4, 4, 1, 1],
        [REGISTERS, REGISTERS, 24, 24],
    )  # fmt: skip
