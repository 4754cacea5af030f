"""LayerNorm forward in Triton: a few whole rows to a program.

    x, residual, out  [M, C]      weight, bias, offset  [C] fp32 or x's dtype

Memory bound: x (and residual) read once, out written once, in x's dtype or in 8 bits. A row is held
as two exact column parts where C allows (96 = 64 + 32), else padded to the next power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, on_device
from fastswin._triton.launch import on_grid
from fastswin._triton.math import (
    centre_rows,
    inverse_step,
    round_to_8_bits,
    rows_to_8_bits,
    tf32_number,
)
from fastswin._triton.pdl import pdl_options, wait_for_previous
from fastswin.ops.layer_norm.config import NUM_WARPS, narrow_tiles, num_programs, row_tiles
from fastswin.ops.quantize.forward import row_amax_bits, token_step
from fastswin.ops.quantize.reference import LARGEST, SMALLEST_STEP


@triton.jit
def _affine(
    y, weight_ptr, bias_ptr, column, valid, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr
):
    if HAS_WEIGHT:
        y = y * tl.load(weight_ptr + column, mask=valid, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y = y + tl.load(bias_ptr + column, mask=valid, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def _layer_norm_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, offset_ptr, residual_ptr, out_ptr, M, eps,
    C: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr, BLOCK_M: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    output_scale_ptr=None, row_scale_ptr=None,
    LARGEST: tl.constexpr = 127.0, SMALLEST: tl.constexpr = 0.0, PDL: tl.constexpr = False,
    TF32: tl.constexpr = False,
):  # fmt: skip
    """One program per BLOCK_M rows; columns in parts CA (padded when CB == 0) and CB.

    8 bits are written with the step at ``output_scale_ptr``, or with one step a row, which goes to
    ``row_scale_ptr``.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    row = tl.arange(0, BLOCK_M)
    valid = (first + row < M)[:, None]
    x_ptr += first * C
    out_ptr += first * C
    residual_ptr += first * C
    ca = tl.arange(0, CA)
    cb = CA + tl.arange(0, CB if CB > 0 else 16)
    at = row[:, None] * C
    ma = valid & (ca < C)[None, :]
    mb = valid & (cb < C)[None, :]
    inverse = 1.0
    if output_scale_ptr is not None:  # before x, so that no second wait for memory follows x's
        inverse = inverse_step(tl.load(output_scale_ptr))
    wait_for_previous(PDL)
    a = tl.load(x_ptr + at + ca[None, :], mask=ma, other=0.0).to(tl.float32)
    b = a
    if CB > 0:
        b = tl.load(x_ptr + at + cb[None, :], mask=mb, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        a += tl.load(offset_ptr + ca, mask=ca < C, other=0.0).to(tl.float32)[None, :]
        if CB > 0:
            b += tl.load(offset_ptr + cb, mask=cb < C, other=0.0).to(tl.float32)[None, :]
    if CA > C:  # padded columns must not enter the sums
        mean = tl.sum(a, 1) / C
        a = tl.where((ca < C)[None, :], a - mean[:, None], 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(a * a, 1) / C + eps)
    else:
        a, b, rstd = centre_rows(a, b, C, CB, eps)
    FORMAT: tl.constexpr = out_ptr.dtype.element_ty
    BARE: tl.constexpr = not (HAS_WEIGHT or HAS_BIAS)
    if output_scale_ptr is None or not BARE:
        a = _affine(a * rstd[:, None], weight_ptr, bias_ptr, ca, ca < C, HAS_WEIGHT, HAS_BIAS)
        b = b * rstd[:, None]
    if output_scale_ptr is not None and BARE:
        factor = rstd[:, None] * inverse
        tl.store(out_ptr + at + ca[None, :], rows_to_8_bits(a, factor, FORMAT), mask=ma)
        if CB > 0:
            tl.store(out_ptr + at + cb[None, :], rows_to_8_bits(b, factor, FORMAT), mask=mb)
    elif output_scale_ptr is not None or row_scale_ptr is not None:
        if CB > 0:
            b = _affine(b, weight_ptr, bias_ptr, cb, cb < C, HAS_WEIGHT, HAS_BIAS)
        if row_scale_ptr is not None:
            amax_bits = row_amax_bits(a)
            if CB > 0:
                amax_bits = tl.maximum(amax_bits, row_amax_bits(b))
            step = token_step(amax_bits.to(tl.float32, bitcast=True), LARGEST, SMALLEST)
            tl.store(row_scale_ptr + first + row, step, mask=first + row < M)
            inverse = tl.div_rn(1.0, step)[:, None]
        q = round_to_8_bits(a * inverse, out_ptr.dtype.element_ty)
        tl.store(out_ptr + at + ca[None, :], q, mask=ma)
        if CB > 0:
            r = round_to_8_bits(b * inverse, out_ptr.dtype.element_ty)
            tl.store(out_ptr + at + cb[None, :], r, mask=mb)
    else:
        if HAS_RESIDUAL:
            a += tl.load(residual_ptr + at + ca[None, :], mask=ma, other=0.0).to(tl.float32)
        if TF32:
            a = tf32_number(a)
        tl.store(out_ptr + at + ca[None, :], a.to(out_ptr.dtype.element_ty), mask=ma)
        if CB > 0:
            b = _affine(b, weight_ptr, bias_ptr, cb, cb < C, HAS_WEIGHT, HAS_BIAS)
            if HAS_RESIDUAL:
                b += tl.load(residual_ptr + at + cb[None, :], mask=mb, other=0.0).to(tl.float32)
            if TF32:
                b = tf32_number(b)
            tl.store(out_ptr + at + cb[None, :], b.to(out_ptr.dtype.element_ty), mask=mb)


def layer_norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    output_scale: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    pdl: bool = False,
    tf32: bool = False,
) -> torch.Tensor:
    """Launch on contiguous ``x [..., C]``; see the public function for the arguments.

    8 bits need an ``out``, whose dtype is their format, and ``output_scale`` or a ``row_scale
    [...]`` that is written.
    """
    C = x.shape[-1]
    x = x.contiguous()
    if out is None:
        out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    M = x.numel() // C
    tiles, num_warps = (row_tiles(C), NUM_WARPS) if out.itemsize > 1 else narrow_tiles(C, M)
    with on_device(x.device):
        on_grid(_layer_norm_fwd_kernel, (num_programs(M, tiles),))(
            x,
            x if weight is None else weight,
            x if bias is None else bias,
            x if offset is None else offset,
            x if residual is None else residual.contiguous(),
            out, M, eps, C=C, **tiles._asdict(),
            HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
            HAS_OFFSET=offset is not None, HAS_RESIDUAL=residual is not None,
            output_scale_ptr=output_scale, row_scale_ptr=row_scale,
            LARGEST=LARGEST.get(out.dtype, 0.0), SMALLEST=SMALLEST_STEP, num_warps=num_warps,
            TF32=tf32, **pdl_options(pdl, device_capability(x.device)),
        )  # fmt: skip
    return out
