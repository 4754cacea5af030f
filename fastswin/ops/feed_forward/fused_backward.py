"""Backward of the feed-forward layer as one Triton kernel that makes the hidden map again.

    pre = x fc1' + b1    act = gelu(pre)    dpre = (dy fc2) * gelu'(pre)    dx = dpre fc1

    x, dy, dx [M, C]    act, dpre [M, hidden], written for the library's weight gradients

Moves 11 units of ``M * C * itemsize`` where passes of their own move 26, and needs nothing kept
but x. Each program leaves the sums of its rows for fc1's bias gradient; a second kernel adds them
up in a fixed order: no atomics. One program per row tile: a loop over tiles would hold addresses
in 80 registers a thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.launch import launch
from fastswin._triton.math import gelu_and_slope
from fastswin._triton.tiles import cdiv, split_columns
from fastswin.ops.feed_forward.bias_sums import bias_partials, sum_bias_partials
from fastswin.ops.feed_forward.config import FusedConfig
from fastswin.ops.feed_forward.fused_forward import load_tile
from fastswin.ops.feed_forward.operands import describe, weight_descriptors


@triton.jit
def _load_rows(
    ptr, desc, first, column, M, STRIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """``[ROWS, COLS]`` from row ``first`` on; rows past M are zeros."""
    if TMA:
        return desc.load([first.to(tl.int32), column])
    row = tl.arange(0, ROWS)
    at = row[:, None] * STRIDE + column + tl.arange(0, COLS)[None, :]
    return tl.load(ptr + first * STRIDE + at, mask=(first + row < M)[:, None], other=0.0)


@triton.jit
def _store_rows(
    tile, ptr, desc, first, column, M, STRIDE: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The counterpart; rows past M are left out."""
    value = tile.to(ptr.dtype.element_ty)
    if TMA:
        desc.store([first.to(tl.int32), column], value)
    else:
        row = tl.arange(0, ROWS)
        at = row[:, None] * STRIDE + column + tl.arange(0, COLS)[None, :]
        tl.store(ptr + first * STRIDE + at, value, mask=(first + row < M)[:, None])


@triton.jit(do_not_specialize=["M"])
def _fused_bwd_kernel(
    x_ptr, x_a_desc, x_b_desc, dy_ptr, dy_a_desc, dy_b_desc, fc1_ptr, fc1_a_desc, fc1_b_desc,
    fc1_bias_ptr, fc2_ptr, fc2_a_desc, fc2_b_desc, act_ptr, act_desc, dpre_ptr, dpre_desc,
    dx_ptr, partial_ptr, M,
    CA: tl.constexpr, CB: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr, TMA: tl.constexpr, TMA_STORE: tl.constexpr,
    HAS_BIAS: tl.constexpr, NEED_X: tl.constexpr, NEED_W1: tl.constexpr, NEED_B1: tl.constexpr,
    NEED_W2: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_M rows, walking over the hidden units."""
    C: tl.constexpr = CA + CB
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    NEED_DPRE: tl.constexpr = NEED_X or NEED_W1 or NEED_B1
    unit = tl.arange(0, BLOCK_H)
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    partial_ptr += tl.program_id(0).to(tl.int64) * HIDDEN
    xa = _load_rows(x_ptr, x_a_desc, first, 0, M, C, BLOCK_M, CA, TMA)
    dya = _load_rows(dy_ptr, dy_a_desc, first, 0, M, C, BLOCK_M, CA, TMA)
    dxa = tl.zeros([BLOCK_M, CA], tl.float32)
    xb, dyb, dxb = xa, dya, dxa
    if CB > 0:
        xb = _load_rows(x_ptr, x_b_desc, first, CA, M, C, BLOCK_M, CB, TMA)
        dyb = _load_rows(dy_ptr, dy_b_desc, first, CA, M, C, BLOCK_M, CB, TMA)
        dxb = tl.zeros([BLOCK_M, CB], tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK_H, num_stages=NUM_STAGES):
        w1a = load_tile(fc1_ptr, fc1_a_desc, start, 0, C, BLOCK_H, CA, TMA)
        pre = tl.dot(xa, w1a.T)
        w1b = w1a
        if CB > 0:
            w1b = load_tile(fc1_ptr, fc1_b_desc, start, CA, C, BLOCK_H, CB, TMA)
            pre = tl.dot(xb, w1b.T, pre)
        if HAS_BIAS:
            pre += tl.load(fc1_bias_ptr + start + unit).to(tl.float32)[None, :]
        act, slope = gelu_and_slope(pre)
        if NEED_W2:
            _store_rows(
                act, act_ptr, act_desc, first, start, M, HIDDEN, BLOCK_M, BLOCK_H, TMA_STORE
            )
        if NEED_DPRE:
            w2 = load_tile(fc2_ptr, fc2_a_desc, 0, start, HIDDEN, CA, BLOCK_H, TMA)
            dact = tl.dot(dya, w2)
            if CB > 0:
                w2 = load_tile(fc2_ptr, fc2_b_desc, CA, start, HIDDEN, CB, BLOCK_H, TMA)
                dact = tl.dot(dyb, w2, dact)
            dpre = dact * slope
            if NEED_B1:
                tl.store(partial_ptr + start + unit, tl.sum(dpre, 0))
            if NEED_W1:
                _store_rows(
                    dpre, dpre_ptr, dpre_desc, first, start, M, HIDDEN, BLOCK_M, BLOCK_H,
                    TMA_STORE,
                )  # fmt: skip
            if NEED_X:
                dxa = tl.dot(dpre.to(dtype), w1a, dxa)
                if CB > 0:
                    dxb = tl.dot(dpre.to(dtype), w1b, dxb)
    if NEED_X:
        _store_rows(dxa, dx_ptr, dx_ptr, first, 0, M, C, BLOCK_M, CA, False)
        if CB > 0:
            _store_rows(dxb, dx_ptr, dx_ptr, first, CA, M, C, BLOCK_M, CB, False)


def fused_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor,
    needs: list[bool],
    config: FusedConfig,
) -> tuple[torch.Tensor | None, ...]:
    """``(act, dpre, dx, db1)``, None where ``needs`` of x, fc1, its bias and fc2 does not ask.

    Args:
        dy, x: ``[M, C]``, contiguous and aligned, as are the weights; all in one dtype.
        fc1_bias: ``[hidden]`` in any float dtype, or None.
        needs: as above; act belongs to fc2's gradient, dpre to fc1's.
        config: of the kernel.
    """
    need_x, need_w1, need_b1, need_w2 = needs
    M, C = x.shape
    hidden = fc1_weight.shape[0]
    act = x.new_empty(M, hidden) if need_w2 else None
    dpre = x.new_empty(M, hidden) if need_w1 else None
    dx = torch.empty_like(x) if need_x else None
    db1 = x.new_empty(hidden, dtype=torch.float32) if need_b1 else None
    if M == 0:
        return act, dpre, dx, None if db1 is None else db1.zero_()
    columns = split_columns(C)
    assert columns is not None  # fused_blocker was asked before
    fc1, fc2 = weight_descriptors(fc1_weight, fc2_weight, columns, config.block_h, config.tma)
    tiles = cdiv(M, config.block_m)
    partial = bias_partials(tiles, hidden, x) if need_b1 else x

    def hidden_tiles(t: torch.Tensor | None) -> tuple:
        if t is None:
            return x, x
        return t, describe(t, config.block_m, config.block_h) if config.tma_store else t

    def rows(t: torch.Tensor) -> tuple:
        if not config.tma:
            return t, t, t
        return t, *(describe(t, config.block_m, part or columns[0]) for part in columns)

    launch(
        _fused_bwd_kernel, tiles,
        *rows(x), *rows(dy), fc1_weight, *fc1, x if fc1_bias is None else fc1_bias, fc2_weight,
        *fc2, *hidden_tiles(act), *hidden_tiles(dpre), x if dx is None else dx, partial, M,
        CA=columns[0], CB=columns[1], HIDDEN=hidden, BLOCK_M=config.block_m,
        BLOCK_H=config.block_h, TMA=config.tma,
        TMA_STORE=config.tma_store, HAS_BIAS=fc1_bias is not None, NEED_X=need_x, NEED_W1=need_w1,
        NEED_B1=need_b1, NEED_W2=need_w2, NUM_STAGES=config.num_stages, num_warps=config.num_warps,
        **config.register_limit,
    )  # fmt: skip
    if db1 is not None:
        sum_bias_partials(partial, db1)
    return act, dpre, dx, db1
