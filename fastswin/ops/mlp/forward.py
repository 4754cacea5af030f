"""The MLP half of a block as one Triton kernel: LN, fc1, GELU, fc2, residual.

    x, out [M, C]   fc1 [4C, C]   fc2 [C, 4C]

16 M C**2 FLOPs. As two GEMMs the hidden map costs 8 of 11 units of M * C * itemsize bytes; here it
exists only as a tile ``[BLOCK_M, BLOCK_H]`` and x is read and written once. Each program streams
both weights (8 C**2 * itemsize bytes, from L2), which pays up to about 256 channels. Rows are held
as two exact column parts (96 = 64 + 32).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, on_device
from fastswin._triton.launch import on_grid
from fastswin._triton.math import gelu, nearest_tf32, normalize_rows
from fastswin._triton.pdl import pdl_options, wait_for_previous
from fastswin._triton.tensor_copy import COPY_BYTES
from fastswin._triton.tiles import cdiv, split_columns
from fastswin.ops.hopper_resident.config import ResidentMlpConfig, chosen_mlp
from fastswin.ops.mlp.config import MlpConfig, default_mlp_config, default_tf32_mlp_config
from fastswin.ops.streamed_mlp.config import StreamedMlpConfig, chosen_streamed_mlp


@triton.jit
def _tile(weight, desc, row_start, col_start, STRIDE: tl.constexpr,
          ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """``weight[row_start : + ROWS, col_start : + COLS]``, given transposed ``[COLS, ROWS]``."""
    if TMA:
        return desc.load([row_start, col_start]).T
    row = row_start + tl.arange(0, ROWS)
    col = col_start + tl.arange(0, COLS)
    return tl.trans(tl.load(weight + row[:, None] * STRIDE + col[None, :]))


@triton.jit
def _mlp_fwd_kernel(
    x_ptr, fc1_ptr, fc1_a_desc, fc1_b_desc, fc1_bias_ptr,
    fc2_ptr, fc2_a_desc, fc2_b_desc, fc2_bias_ptr, norm_weight_ptr, norm_bias_ptr,
    offset_ptr, out_ptr, M, eps,
    CA: tl.constexpr, CB: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, POST_NORM: tl.constexpr, TMA: tl.constexpr,
    HAS_OFFSET: tl.constexpr, NUM_STAGES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program per BLOCK_M rows, walking over the hidden units."""
    C: tl.constexpr = CA + CB
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.arange(0, BLOCK_M)
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    valid = (first + row < M)[:, None]
    ca = tl.arange(0, CA)
    cb = CA + tl.arange(0, CB if CB > 0 else 16)
    at = row[:, None] * C
    x_ptr += first * C
    wait_for_previous(PDL)
    xa = tl.load(x_ptr + at + ca[None, :], mask=valid, other=0.0).to(tl.float32)
    xb = xa
    if CB > 0:
        xb = tl.load(x_ptr + at + cb[None, :], mask=valid, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        xa += tl.load(offset_ptr + ca).to(tl.float32)[None, :]
        if CB > 0:
            xb += tl.load(offset_ptr + cb).to(tl.float32)[None, :]
    na = xa
    nb = xb
    if not POST_NORM:
        na, nb = normalize_rows(xa, xb, C, CB, eps)
    if dtype == tl.float32:  # products of fp32 numbers are TF32's
        na = nearest_tf32(na)
        nb = nearest_tf32(nb)
    na = na.to(dtype)
    nb = nb.to(dtype)
    # the fc2 bias (and, norm first, the residual) is where the accumulator starts
    acc_a = tl.zeros([BLOCK_M, CA], tl.float32) + tl.load(fc2_bias_ptr + ca).to(tl.float32)[None, :]
    acc_b = acc_a
    if CB > 0:
        acc_b = tl.zeros([BLOCK_M, CB], tl.float32)
        acc_b += tl.load(fc2_bias_ptr + cb).to(tl.float32)[None, :]
    if not POST_NORM:
        acc_a += xa
        if CB > 0:
            acc_b += xb
    for start in tl.range(0, HIDDEN, BLOCK_H, num_stages=NUM_STAGES):
        w = _tile(fc1_ptr, fc1_a_desc, start, 0, C, BLOCK_H, CA, TMA)
        h = tl.dot(na, w, input_precision="tf32")
        if CB > 0:
            w = _tile(fc1_ptr, fc1_b_desc, start, CA, C, BLOCK_H, CB, TMA)
            h = tl.dot(nb, w, h, input_precision="tf32")
        unit = start + tl.arange(0, BLOCK_H)
        h += tl.load(fc1_bias_ptr + unit).to(tl.float32)[None, :]
        h = gelu(h)
        if dtype == tl.float32:
            h = nearest_tf32(h)
        h = h.to(dtype)
        w = _tile(fc2_ptr, fc2_a_desc, 0, start, HIDDEN, CA, BLOCK_H, TMA)
        acc_a = tl.dot(h, w, acc_a, input_precision="tf32")
        if CB > 0:
            w = _tile(fc2_ptr, fc2_b_desc, CA, start, HIDDEN, CB, BLOCK_H, TMA)
            acc_b = tl.dot(h, w, acc_b, input_precision="tf32")
    if POST_NORM:
        acc_a, acc_b = normalize_rows(acc_a, acc_b, C, CB, eps)
        acc_a = acc_a * tl.load(norm_weight_ptr + ca).to(tl.float32)[None, :]
        acc_a += tl.load(norm_bias_ptr + ca).to(tl.float32)[None, :]
        acc_a += tl.load(x_ptr + at + ca[None, :], mask=valid, other=0.0).to(tl.float32)
        if HAS_OFFSET:
            acc_a += tl.load(offset_ptr + ca).to(tl.float32)[None, :]
        if CB > 0:
            acc_b = acc_b * tl.load(norm_weight_ptr + cb).to(tl.float32)[None, :]
            acc_b += tl.load(norm_bias_ptr + cb).to(tl.float32)[None, :]
            acc_b += tl.load(x_ptr + at + cb[None, :], mask=valid, other=0.0).to(tl.float32)
            if HAS_OFFSET:
                acc_b += tl.load(offset_ptr + cb).to(tl.float32)[None, :]
    out_ptr += first * C
    tl.store(out_ptr + at + ca[None, :], acc_a.to(out_ptr.dtype.element_ty), mask=valid)
    if CB > 0:
        tl.store(out_ptr + at + cb[None, :], acc_b.to(out_ptr.dtype.element_ty), mask=valid)


def mlp_fwd(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    offset: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
    config: MlpConfig | ResidentMlpConfig | StreamedMlpConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Launch on ``x [..., C]``; see the public function."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, fc1_weight, fc2_weight = x.contiguous(), fc1_weight.contiguous(), fc2_weight.contiguous()
    if out is None:
        out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    C, hidden = x.shape[-1], fc1_weight.shape[0]
    M = x.numel() // C
    if config is None:
        config = chosen_mlp(M, hidden, C, x.dtype, x.device)
    if config is None:
        config = chosen_streamed_mlp(M, hidden, C, x.dtype, x.device)
    if isinstance(config, ResidentMlpConfig | StreamedMlpConfig):
        if not any(t.data_ptr() % COPY_BYTES for t in (x, fc1_weight, fc2_weight, out)):
            hopper_mlp_fwd: Callable[..., torch.Tensor]
            if isinstance(config, ResidentMlpConfig):
                from fastswin.ops.hopper_resident.launch import resident_mlp_fwd as hopper_mlp_fwd
            else:
                from fastswin.ops.streamed_mlp.launch import streamed_mlp_fwd as hopper_mlp_fwd
            norm = None
            if norm_weight is not None and norm_bias is not None:
                norm = norm_weight, norm_bias
            hopper_mlp_fwd(
                x.view(M, C), (fc1_weight, fc1_bias), (fc2_weight, fc2_bias), norm, offset, eps,
                out.view(M, C), config, pdl,
            )  # fmt: skip
            return out
        config = None
    if config is None:
        wide = x.dtype == torch.float32
        heuristic = default_tf32_mlp_config if wide else default_mlp_config
        config = heuristic(C, device_capability(x.device))
    columns = split_columns(C)
    assert columns is not None  # mlp_blocker was asked before
    CA, CB = columns
    fc1 = (fc1_weight, fc1_weight)
    fc2 = (fc2_weight, fc2_weight)
    if config.tma:
        parts = (CA, CB or CA)
        fc1 = tuple(TensorDescriptor.from_tensor(fc1_weight, [config.block_h, c]) for c in parts)
        fc2 = tuple(TensorDescriptor.from_tensor(fc2_weight, [c, config.block_h]) for c in parts)
    with on_device(x.device):
        on_grid(_mlp_fwd_kernel, (cdiv(M, config.block_m),))(
            x, fc1_weight, *fc1, fc1_bias, fc2_weight, *fc2, fc2_bias,
            x if norm_weight is None else norm_weight, x if norm_bias is None else norm_bias,
            x if offset is None else offset, out, M, eps,
            CA=CA, CB=CB, HIDDEN=hidden, BLOCK_M=config.block_m, BLOCK_H=config.block_h,
            POST_NORM=norm_weight is not None, TMA=config.tma, HAS_OFFSET=offset is not None,
            NUM_STAGES=config.num_stages, num_warps=config.num_warps,
            **pdl_options(pdl, device_capability(x.device)),
        )  # fmt: skip
    return out
