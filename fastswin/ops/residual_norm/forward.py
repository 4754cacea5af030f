"""Residual add and LayerNorm in Triton: a few whole rows to a program, each read once.

    x, branch, stream, normed  [M, C]      weight, bias, branch_bias  [C]
    branch_scale               [B]         mean, rstd                 [M] fp32, kept for backward

Memory bound. Rows are held as two exact column parts where C allows (96 = 64 + 32), else padded to
the next power of two. The norm reads the stream as rounded to its own dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.launch import launch
from fastswin._triton.tiles import cdiv
from fastswin.ops.residual_norm.config import column_parts, num_warps, rows_per_tile
from fastswin.ops.residual_norm.register import NO_NORM, NORM_STREAM, Tensors4


@triton.jit
def image_scale(scale_ptr, row, rows_per_image, valid, WIDE: tl.constexpr):
    """Drop path's factor of each row's image; a division in 64 bits costs a fifth of a kernel."""
    image = row // rows_per_image if WIDE else row.to(tl.int32) // rows_per_image
    return tl.load(scale_ptr + image, mask=valid, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _branch_part(
    branch_ptr, branch_bias_ptr, at, column, valid, C: tl.constexpr, HAS_BIAS: tl.constexpr
):
    y = tl.load(branch_ptr + at, mask=valid, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(branch_bias_ptr + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def _affine_part(
    z, weight_ptr, bias_ptr, column, C: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    if HAS_WEIGHT:
        z = z * tl.load(weight_ptr + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        z = z + tl.load(bias_ptr + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit(do_not_specialize=["M", "rows_per_image"])
def _residual_norm_fwd_kernel(
    x_ptr, branch_ptr, weight_ptr, bias_ptr, branch_bias_ptr, scale_ptr,
    stream_ptr, normed_ptr, mean_ptr, rstd_ptr, M, rows_per_image, eps,
    C: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr, BLOCK_M: tl.constexpr,
    NORM: tl.constexpr, HAS_BRANCH: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_BRANCH_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_M rows; columns in parts CA (padded when CB == 0) and CB."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < M
    ca = tl.arange(0, CA)
    cb = CA + tl.arange(0, CB if CB > 0 else 16)
    at_a = row[:, None] * C + ca[None, :]
    at_b = row[:, None] * C + cb[None, :]
    ma = valid[:, None] & (ca < C)[None, :]
    mb = valid[:, None] & (cb < C)[None, :]
    xa = tl.load(x_ptr + at_a, mask=ma, other=0.0).to(tl.float32)
    xb = xa
    if CB > 0:
        xb = tl.load(x_ptr + at_b, mask=mb, other=0.0).to(tl.float32)
    za, zb = xa, xb
    if HAS_BRANCH:
        za = _branch_part(branch_ptr, branch_bias_ptr, at_a, ca, ma, C, HAS_BRANCH_BIAS)
        if CB > 0:
            zb = _branch_part(branch_ptr, branch_bias_ptr, at_b, cb, mb, C, HAS_BRANCH_BIAS)
        if HAS_SCALE:
            scale = image_scale(scale_ptr, row, rows_per_image, valid, WIDE)
        if NORM != 2:
            if HAS_SCALE:
                za *= scale
                zb *= scale
            za = (xa + za).to(stream_ptr.dtype.element_ty)
            tl.store(stream_ptr + at_a, za, mask=ma)
            za = za.to(tl.float32)
            if CB > 0:
                zb = (xb + zb).to(stream_ptr.dtype.element_ty)
                tl.store(stream_ptr + at_b, zb, mask=mb)
                zb = zb.to(tl.float32)
    if NORM > 0:
        if CA > C:  # padded columns must not enter the sums
            za = tl.where((ca < C)[None, :], za, 0.0)
        total = tl.sum(za, 1)
        if CB > 0:
            total += tl.sum(zb, 1)
        mean = total / C
        za -= mean[:, None]
        if CA > C:
            za = tl.where((ca < C)[None, :], za, 0.0)
        square = tl.sum(za * za, 1)
        if CB > 0:
            zb -= mean[:, None]
            square += tl.sum(zb * zb, 1)
        rstd = 1.0 / tl.sqrt(square / C + eps)
        tl.store(mean_ptr + row, mean, mask=valid)
        tl.store(rstd_ptr + row, rstd, mask=valid)
        za = _affine_part(za * rstd[:, None], weight_ptr, bias_ptr, ca, C, HAS_WEIGHT, HAS_BIAS)
        if CB > 0:
            zb = _affine_part(zb * rstd[:, None], weight_ptr, bias_ptr, cb, C, HAS_WEIGHT, HAS_BIAS)
        if NORM == 1:
            tl.store(normed_ptr + at_a, za.to(normed_ptr.dtype.element_ty), mask=ma)
            if CB > 0:
                tl.store(normed_ptr + at_b, zb.to(normed_ptr.dtype.element_ty), mask=mb)
        else:
            if HAS_SCALE:
                za *= scale
                zb *= scale
            tl.store(stream_ptr + at_a, (xa + za).to(stream_ptr.dtype.element_ty), mask=ma)
            if CB > 0:
                tl.store(stream_ptr + at_b, (xb + zb).to(stream_ptr.dtype.element_ty), mask=mb)


def residual_norm_fwd(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    branch_scale: torch.Tensor | None,
    eps: float,
    norm: int,
    stream_dtype: torch.dtype,
    norm_dtype: torch.dtype,
) -> Tensors4:
    """Launch; ``(stream, normed, mean, rstd)``, empty where not asked for."""
    C = x.shape[-1]
    x = x.contiguous()
    nothing = (0,)
    rows = x.shape[:-1] if norm else nothing
    stream = torch.empty(x.shape if branch is not None else nothing, dtype=stream_dtype,
                         device=x.device)  # fmt: skip
    normed = torch.empty(x.shape if norm == NORM_STREAM else nothing, dtype=norm_dtype,
                         device=x.device)  # fmt: skip
    mean = torch.empty(rows, dtype=torch.float32, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if x.numel() == 0 or (branch is None and norm == NO_NORM):
        return stream, normed, mean, rstd
    M = x.numel() // C
    CA, CB = column_parts(C)
    block_m = rows_per_tile(C)
    launch(
        _residual_norm_fwd_kernel, cdiv(M, block_m),
        x,
        x if branch is None else branch.contiguous(),
        x if weight is None else weight.contiguous(),
        x if bias is None else bias.contiguous(),
        x if branch_bias is None else branch_bias.contiguous(),
        x if branch_scale is None else branch_scale.contiguous(),
        stream, normed, mean, rstd, M, M // x.shape[0], eps,
        C=C, CA=CA, CB=CB, BLOCK_M=block_m, NORM=norm, HAS_BRANCH=branch is not None,
        HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
        HAS_BRANCH_BIAS=branch_bias is not None, HAS_SCALE=branch_scale is not None,
        WIDE=M >= 2**31, num_warps=num_warps(C),
    )  # fmt: skip
    return stream, normed, mean, rstd
