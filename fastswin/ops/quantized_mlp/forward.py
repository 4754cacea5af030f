"""The MLP half of a block on 8-bit operands as one Triton kernel.

    x, out [M, C]   fc1 [hidden, C]   fc2 [C, hidden], one byte each   scales, biases fp32

LayerNorm and rounding, fc1, GELU and rounding, fc2, residual: the hidden map exists only as a tile
``[BLOCK_M, BLOCK_H]`` and x is read and written once. Rows are two exact column parts (192 =
128 + 64). int8 sums are int32, exact. fc1's rows come in the order of ``order_rows``, so that the
hidden tile is an operand as fc1's sums leave it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, on_device
from fastswin._triton.launch import on_grid
from fastswin._triton.math import centre_rows, gelu_to_8_bits, inverse_step, rows_to_8_bits
from fastswin._triton.tiles import cdiv, split_columns
from fastswin.ops.quantized_mlp.config import QuantizedMlpConfig, default_quantized_mlp_config


@triton.jit
def _tile(weight_ptr, desc, first_row, first_col, STRIDE: tl.constexpr,
          ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """``weight[first_row : + ROWS, first_col : + COLS]``, given transposed ``[COLS, ROWS]``."""
    if TMA:
        tile = desc.load([first_row, first_col]).T
    else:
        row = first_row + tl.arange(0, ROWS)
        col = first_col + tl.arange(0, COLS)
        tile = tl.trans(tl.load(weight_ptr + row[:, None] * STRIDE + col[None, :]))
    return tile


@triton.jit
def _stream(x_ptr, offset_ptr, at, col, valid):
    """Columns ``col`` of the residual stream in fp32, pending offset added."""
    x = tl.load(x_ptr + at + col[None, :], mask=valid, other=0.0).to(tl.float32)
    if offset_ptr is not None:
        x += tl.load(offset_ptr + col).to(tl.float32)[None, :]
    return x


@triton.jit
def _store(acc, x_ptr, offset_ptr, scale_ptr, bias_ptr, out_ptr, at, col, valid):
    """fc2's epilogue for columns ``col``; x is read again, so that no register holds it."""
    y = acc.to(tl.float32) * tl.load(scale_ptr + col)[None, :] + tl.load(bias_ptr + col)[None, :]
    y += _stream(x_ptr, offset_ptr, at, col, valid)
    tl.store(out_ptr + at + col[None, :], y.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["M"])
def _quantized_mlp_kernel(
    x_ptr, offset_ptr, fc1_ptr, fc1_a_desc, fc1_b_desc, fc1_scale_ptr, fc1_bias_ptr,
    fc2_ptr, fc2_a_desc, fc2_b_desc, fc2_scale_ptr, fc2_bias_ptr,
    input_scale_ptr, hidden_scale_ptr, out_ptr, M, eps,
    CA: tl.constexpr, CB: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, TMA: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_M rows, walking over the hidden units."""
    C: tl.constexpr = CA + CB
    dtype: tl.constexpr = fc1_ptr.dtype.element_ty
    sums: tl.constexpr = tl.int32 if dtype == tl.int8 else tl.float32
    row = tl.arange(0, BLOCK_M)
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    valid = (first + row < M)[:, None]
    ca = tl.arange(0, CA)
    cb = CA + tl.arange(0, CB if CB > 0 else 16)
    at = row[:, None] * C
    x_ptr += first * C
    out_ptr += first * C
    a = _stream(x_ptr, offset_ptr, at, ca, valid)
    b = a
    if CB > 0:
        b = _stream(x_ptr, offset_ptr, at, cb, valid)
    a, b, rstd = centre_rows(a, b, C, CB, eps)
    factor = rstd[:, None] * inverse_step(tl.load(input_scale_ptr))
    qa = rows_to_8_bits(a, factor, dtype)
    qb = qa
    if CB > 0:
        qb = rows_to_8_bits(b, factor, dtype)
    hidden_inverse = inverse_step(tl.load(hidden_scale_ptr))
    acc_a = tl.zeros([BLOCK_M, CA], sums)
    acc_b = acc_a
    if CB > 0:
        acc_b = tl.zeros([BLOCK_M, CB], sums)
    for start in tl.range(0, HIDDEN, BLOCK_H, num_stages=NUM_STAGES):
        w = _tile(fc1_ptr, fc1_a_desc, start, 0, C, BLOCK_H, CA, TMA)
        product = tl.dot(qa, w, out_dtype=sums)
        if CB > 0:
            w = _tile(fc1_ptr, fc1_b_desc, start, CA, C, BLOCK_H, CB, TMA)
            product = tl.dot(qb, w, product, out_dtype=sums)
        unit = start + tl.arange(0, BLOCK_H)
        h = product.to(tl.float32) * tl.load(fc1_scale_ptr + unit)[None, :]
        h += tl.load(fc1_bias_ptr + unit)[None, :]
        q = gelu_to_8_bits(h, hidden_inverse, dtype)  # sums and steps are finite
        # fc1's rows are in the order that makes this no exchange (ordering.py)
        pairs = tl.reshape(q, [BLOCK_M, BLOCK_H // 16, 2, 4, 2])
        q = tl.reshape(tl.permute(pairs, [0, 1, 3, 2, 4]), [BLOCK_M, BLOCK_H])
        w = _tile(fc2_ptr, fc2_a_desc, 0, start, HIDDEN, CA, BLOCK_H, TMA)
        acc_a = tl.dot(q, w, acc_a, out_dtype=sums)
        if CB > 0:
            w = _tile(fc2_ptr, fc2_b_desc, CA, start, HIDDEN, CB, BLOCK_H, TMA)
            acc_b = tl.dot(q, w, acc_b, out_dtype=sums)
    _store(acc_a, x_ptr, offset_ptr, fc2_scale_ptr, fc2_bias_ptr, out_ptr, at, ca, valid)
    if CB > 0:
        _store(acc_b, x_ptr, offset_ptr, fc2_scale_ptr, fc2_bias_ptr, out_ptr, at, cb, valid)


def quantized_mlp_fwd(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_scale: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_scale: torch.Tensor,
    fc2_bias: torch.Tensor,
    input_scale: torch.Tensor,
    hidden_scale: torch.Tensor,
    offset: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
    config: QuantizedMlpConfig | None = None,
) -> torch.Tensor:
    """Launch on contiguous ``x [..., C]``; see the public function, with ``ordered``."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, fc1_weight, fc2_weight = x.contiguous(), fc1_weight.contiguous(), fc2_weight.contiguous()
    if out is None:
        out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    C, hidden = x.shape[-1], fc1_weight.shape[0]
    M = x.numel() // C
    if config is None:
        config = default_quantized_mlp_config(C, device_capability(x.device))
    columns = split_columns(C)
    assert columns is not None  # quantized_mlp_blocker was asked before
    CA, CB = columns
    fc1 = fc2 = (None, None)
    if config.tma:
        parts = (CA, CB or CA)
        fc1 = tuple(TensorDescriptor.from_tensor(fc1_weight, [config.block_h, c]) for c in parts)
        fc2 = tuple(TensorDescriptor.from_tensor(fc2_weight, [c, config.block_h]) for c in parts)
    with on_device(x.device):
        on_grid(_quantized_mlp_kernel, (cdiv(M, config.block_m),))(
            x, offset, fc1_weight, *fc1, fc1_scale, fc1_bias, fc2_weight, *fc2, fc2_scale,
            fc2_bias, input_scale, hidden_scale, out, M, eps, CA=CA, CB=CB, HIDDEN=hidden,
            BLOCK_M=config.block_m, BLOCK_H=config.block_h, TMA=config.tma,
            NUM_STAGES=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip
    return out
