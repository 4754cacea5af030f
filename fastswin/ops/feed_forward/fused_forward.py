"""Forward of the feed-forward layer as one Triton kernel: fc1, bias, GELU, fc2.

    x, y [M, C]    fc1 [hidden, C]    fc2 [C, hidden]

The hidden map exists only as a tile ``[BLOCK_M, BLOCK_H]``: x is read and y written once, the
weights stream from L2. Rows are held as two exact column parts (96 = 64 + 32).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.launch import launch
from fastswin._triton.math import gelu
from fastswin._triton.tiles import cdiv, split_columns
from fastswin.ops.feed_forward.config import FusedConfig
from fastswin.ops.feed_forward.operands import weight_descriptors


@triton.jit
def load_tile(
    weight, desc, row_start, col_start, STRIDE: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """``weight[row_start : + ROWS, col_start : + COLS]`` of rows ``STRIDE`` apart."""
    if TMA:
        return desc.load([row_start, col_start])
    row = row_start + tl.arange(0, ROWS)
    col = col_start + tl.arange(0, COLS)
    return tl.load(weight + row[:, None] * STRIDE + col[None, :])


@triton.jit(do_not_specialize=["M"])
def _fused_fwd_kernel(
    x_ptr, fc1_ptr, fc1_a_desc, fc1_b_desc, fc1_bias_ptr, fc2_ptr, fc2_a_desc, fc2_b_desc, y_ptr, M,
    CA: tl.constexpr, CB: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr, TMA: tl.constexpr, HAS_BIAS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_M rows, walking over the hidden units."""
    C: tl.constexpr = CA + CB
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.arange(0, BLOCK_M)
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    valid = (first + row < M)[:, None]
    ca = tl.arange(0, CA)
    cb = CA + tl.arange(0, CB if CB > 0 else 16)
    x_ptr += first * C
    y_ptr += first * C
    at = row[:, None] * C
    xa = tl.load(x_ptr + at + ca[None, :], mask=valid, other=0.0)
    xb = xa
    ya = tl.zeros([BLOCK_M, CA], tl.float32)
    yb = ya
    if CB > 0:
        xb = tl.load(x_ptr + at + cb[None, :], mask=valid, other=0.0)
        yb = tl.zeros([BLOCK_M, CB], tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK_H, num_stages=NUM_STAGES):
        w = load_tile(fc1_ptr, fc1_a_desc, start, 0, C, BLOCK_H, CA, TMA)
        pre = tl.dot(xa, w.T)
        if CB > 0:
            w = load_tile(fc1_ptr, fc1_b_desc, start, CA, C, BLOCK_H, CB, TMA)
            pre = tl.dot(xb, w.T, pre)
        if HAS_BIAS:
            unit = start + tl.arange(0, BLOCK_H)
            pre += tl.load(fc1_bias_ptr + unit).to(tl.float32)[None, :]
        act = gelu(pre).to(dtype)
        w = load_tile(fc2_ptr, fc2_a_desc, 0, start, HIDDEN, CA, BLOCK_H, TMA)
        ya = tl.dot(act, w.T, ya)
        if CB > 0:
            w = load_tile(fc2_ptr, fc2_b_desc, CA, start, HIDDEN, CB, BLOCK_H, TMA)
            yb = tl.dot(act, w.T, yb)
    tl.store(y_ptr + at + ca[None, :], ya.to(dtype), mask=valid)
    if CB > 0:
        tl.store(y_ptr + at + cb[None, :], yb.to(dtype), mask=valid)


def fused_fwd(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor,
    config: FusedConfig,
) -> torch.Tensor:
    """``y [M, C]`` of contiguous, aligned ``x [M, C]`` and weights in x's dtype."""
    M, C = x.shape
    hidden = fc1_weight.shape[0]
    y = torch.empty_like(x)
    if M == 0:
        return y
    columns = split_columns(C)
    assert columns is not None  # fused_blocker was asked before
    CA, CB = columns
    fc1, fc2 = weight_descriptors(fc1_weight, fc2_weight, columns, config.block_h, config.tma)
    launch(
        _fused_fwd_kernel, cdiv(M, config.block_m),
        x, fc1_weight, *fc1, x if fc1_bias is None else fc1_bias, fc2_weight, *fc2, y, M,
        CA=CA, CB=CB, HIDDEN=hidden, BLOCK_M=config.block_m, BLOCK_H=config.block_h,
        TMA=config.tma, HAS_BIAS=fc1_bias is not None, NUM_STAGES=config.num_stages,
        num_warps=config.num_warps, **config.register_limit,
    )  # fmt: skip
    return y
