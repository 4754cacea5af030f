"""Backward of residual add and LayerNorm in Triton, with every column sum that it passes by.

    z [M, C] the normed rows' input    xhat = (z - mean) * rstd    t = upstream * weight
    LN'(upstream) = (t - mean(t) - xhat * mean(t * xhat)) * rstd

One pass reads z, the norm's gradient and the stream's gradient and writes dx and dbranch. The sums
over rows (dweight, dbias, dbranch_bias) stay element-wise in registers, are reduced once at the end
of a program (a reduction in the loop would cross warps in every tile) and are added up by a second
kernel in a fixed order: no atomics, the same bits every time and on every card.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.launch import launch
from fastswin._triton.tiles import cdiv
from fastswin.ops.residual_norm.config import (
    REDUCE_COLUMNS,
    REDUCE_ROWS,
    backward_programs,
    column_parts,
    num_warps,
    rows_per_tile,
)
from fastswin.ops.residual_norm.forward import image_scale
from fastswin.ops.residual_norm.register import NO_NORM, NORM_BRANCH, Tensors5


@triton.jit
def _xhat_part(
    z_ptr, z_bias_ptr, mean, rstd, at, column, valid, C: tl.constexpr, HAS_Z_BIAS: tl.constexpr
):
    z = tl.load(z_ptr + at, mask=valid, other=0.0).to(tl.float32)
    if HAS_Z_BIAS:
        z += tl.load(z_bias_ptr + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    return (z - mean[:, None]) * rstd[:, None]


@triton.jit(do_not_specialize=["M", "tiles", "rows_per_image"])
def _residual_norm_bwd_kernel(
    d_stream_ptr, d_normed_ptr, z_ptr, mean_ptr, rstd_ptr, weight_ptr, z_bias_ptr, scale_ptr,
    dx_ptr, d_branch_ptr, partial_ptr, M, tiles, rows_per_image,
    C: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr, BLOCK_M: tl.constexpr,
    SUMS: tl.constexpr, NORM: tl.constexpr, HAS_D_STREAM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_Z_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, DX: tl.constexpr, DBRANCH: tl.constexpr,
    DAFFINE: tl.constexpr, DBRANCH_BIAS: tl.constexpr, NUM_STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Program p walks over the row tiles p, p + G, p + 2 G, ... of G programs."""
    p = tl.program_id(0)
    ca = tl.arange(0, CA)
    cb = CA + tl.arange(0, CB if CB > 0 else 16)
    CBP: tl.constexpr = CB if CB > 0 else 16
    wa = tl.full([CA], 1.0, tl.float32)
    wb = tl.full([CBP], 1.0, tl.float32)
    if HAS_WEIGHT:
        wa = tl.load(weight_ptr + ca, mask=ca < C, other=0.0).to(tl.float32)
        if CB > 0:
            wb = tl.load(weight_ptr + cb, mask=cb < C, other=0.0).to(tl.float32)
    dwa = tl.zeros([BLOCK_M, CA], tl.float32)
    dba = tl.zeros([BLOCK_M, CA], tl.float32)
    dra = tl.zeros([BLOCK_M, CA], tl.float32)
    dwb = tl.zeros([BLOCK_M, CBP], tl.float32)
    dbb = tl.zeros([BLOCK_M, CBP], tl.float32)
    drb = tl.zeros([BLOCK_M, CBP], tl.float32)
    for tile in tl.range(0, tiles, num_stages=NUM_STAGES):
        row = (p + tile * tl.num_programs(0)).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = row < M
        at_a = row[:, None] * C + ca[None, :]
        at_b = row[:, None] * C + cb[None, :]
        ma = valid[:, None] & (ca < C)[None, :]
        mb = valid[:, None] & (cb < C)[None, :]
        da = tl.zeros([BLOCK_M, CA], tl.float32)
        db = tl.zeros([BLOCK_M, CBP], tl.float32)
        scale = tl.full([BLOCK_M, 1], 1.0, tl.float32)
        if HAS_SCALE:
            scale = image_scale(scale_ptr, row, rows_per_image, valid, WIDE)
        if HAS_D_STREAM:
            da = tl.load(d_stream_ptr + at_a, mask=ma, other=0.0).to(tl.float32)
            if CB > 0:
                db = tl.load(d_stream_ptr + at_b, mask=mb, other=0.0).to(tl.float32)
        if NORM > 0:
            mean = tl.load(mean_ptr + row, mask=valid, other=0.0)
            rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)
            ha = _xhat_part(z_ptr, z_bias_ptr, mean, rstd, at_a, ca, ma, C, HAS_Z_BIAS)
            hb = ha
            if CB > 0:
                hb = _xhat_part(z_ptr, z_bias_ptr, mean, rstd, at_b, cb, mb, C, HAS_Z_BIAS)
            if NORM == 2:
                ua = da * scale
                ub = db * scale
                da = tl.zeros([BLOCK_M, CA], tl.float32)
                db = tl.zeros([BLOCK_M, CBP], tl.float32)
            else:
                ua = tl.load(d_normed_ptr + at_a, mask=ma, other=0.0).to(tl.float32)
                ub = db
                if CB > 0:
                    ub = tl.load(d_normed_ptr + at_b, mask=mb, other=0.0).to(tl.float32)
            if DAFFINE:
                dwa += ua * ha
                dba += ua
                if CB > 0:
                    dwb += ub * hb
                    dbb += ub
            ua *= wa[None, :]
            mean_t = tl.sum(ua, 1)
            mean_th = tl.sum(ua * ha, 1)
            if CB > 0:
                ub *= wb[None, :]
                mean_t += tl.sum(ub, 1)
                mean_th += tl.sum(ub * hb, 1)
            mean_t = (mean_t / C)[:, None]
            mean_th = (mean_th / C)[:, None]
            da += (ua - mean_t - ha * mean_th) * rstd[:, None]
            if CB > 0:
                db += (ub - mean_t - hb * mean_th) * rstd[:, None]
        if DX:
            tl.store(dx_ptr + at_a, da.to(dx_ptr.dtype.element_ty), mask=ma)
            if CB > 0:
                tl.store(dx_ptr + at_b, db.to(dx_ptr.dtype.element_ty), mask=mb)
        if NORM != 2:
            da *= scale
            db *= scale
        if DBRANCH:
            tl.store(d_branch_ptr + at_a, da.to(d_branch_ptr.dtype.element_ty), mask=ma)
            if CB > 0:
                tl.store(d_branch_ptr + at_b, db.to(d_branch_ptr.dtype.element_ty), mask=mb)
        if DBRANCH_BIAS:
            dra += da
            if CB > 0:
                drb += db
    out = partial_ptr + p.to(tl.int64) * (SUMS * C)
    if DAFFINE:
        tl.store(out + ca, tl.sum(dwa, 0), mask=ca < C)
        tl.store(out + C + ca, tl.sum(dba, 0), mask=ca < C)
        if CB > 0:
            tl.store(out + cb, tl.sum(dwb, 0), mask=cb < C)
            tl.store(out + C + cb, tl.sum(dbb, 0), mask=cb < C)
    if DBRANCH_BIAS:
        tl.store(out + 2 * C + ca, tl.sum(dra, 0), mask=ca < C)
        if CB > 0:
            tl.store(out + 2 * C + cb, tl.sum(drb, 0), mask=cb < C)


@triton.jit(do_not_specialize=["G"])
def _sum_partials_kernel(
    partial_ptr, out0_ptr, out1_ptr, out2_ptr, G,
    C: tl.constexpr, SUMS: tl.constexpr, FIRST: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """``out_k[c] = sum over g of partial[g, k, c]`` for k from FIRST on, in one fixed order."""
    tiles: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    k = FIRST + tl.program_id(0) // tiles
    column = tl.program_id(0) % tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    partial_ptr += k * C
    total = tl.zeros([BLOCK_G, BLOCK_C], tl.float32)
    for start in tl.range(0, G, BLOCK_G):
        row = start + tl.arange(0, BLOCK_G)
        keep = (row < G)[:, None] & (column < C)[None, :]
        at = row[:, None].to(tl.int64) * (SUMS * C) + column[None, :]
        total += tl.load(partial_ptr + at, mask=keep, other=0.0)
    out = tl.sum(total, 0)
    if k == 0:
        tl.store(out0_ptr + column, out, mask=column < C)
    elif k == 1:
        tl.store(out1_ptr + column, out, mask=column < C)
    else:
        tl.store(out2_ptr + column, out, mask=column < C)


def sum_partials(partial: torch.Tensor, outputs: list[torch.Tensor], first: int = 0) -> None:
    """Add up fp32 ``partial [G, sums, C]`` over G into ``outputs[k] [C]`` for k >= first."""
    G, sums, C = partial.shape
    out0, out1, out2 = (outputs + [outputs[-1]] * 2)[:3]
    launch(
        _sum_partials_kernel, (sums - first) * cdiv(C, REDUCE_COLUMNS),
        partial, out0, out1, out2, G, C=C, SUMS=sums, FIRST=first,
        BLOCK_G=REDUCE_ROWS, BLOCK_C=REDUCE_COLUMNS, num_warps=4,
    )  # fmt: skip


def residual_norm_bwd(
    d_stream: torch.Tensor | None,
    d_normed: torch.Tensor | None,
    z: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
    weight: torch.Tensor | None,
    z_bias: torch.Tensor | None,
    branch_scale: torch.Tensor | None,
    norm: int,
    needs: list[bool],
    x_dtype: torch.dtype,
    branch_dtype: torch.dtype,
) -> Tensors5:
    """Launch; ``(dx, dbranch, dweight, dbias, dbranch_bias)``, empty where ``needs`` says no.

    Args:
        needs: of dx, dbranch, the norm's affine pair, and dbranch_bias.
    """
    like = d_stream if d_stream is not None else d_normed
    assert like is not None
    like = like.contiguous()
    C, device = like.shape[-1], like.device
    need_dx, need_branch, need_affine, need_branch_bias = needs
    nothing = (0,)
    dx = torch.empty(like.shape if need_dx else nothing, dtype=x_dtype, device=device)
    d_branch = torch.empty(
        like.shape if need_branch else nothing, dtype=branch_dtype, device=device
    )
    outputs = [
        torch.empty(C if wanted else 0, dtype=torch.float32, device=device)
        for wanted in (need_affine, need_affine, need_branch_bias)
    ]
    if like.numel() == 0:
        for output in outputs:
            output.zero_()
        return dx, d_branch, outputs[0], outputs[1], outputs[2]
    M, block_m = like.numel() // C, rows_per_tile(C)
    programs = backward_programs(M, C)
    CA, CB = column_parts(C)
    sums = 3 if need_branch_bias else 2
    partial = torch.empty(programs, sums, C, dtype=torch.float32, device=device)
    launch(
        _residual_norm_bwd_kernel, programs,
        like if d_stream is None else d_stream.contiguous(),
        like if d_normed is None else d_normed.contiguous(),
        like if z is None or norm == NO_NORM else z.contiguous(),
        like if mean is None else mean,
        like if rstd is None else rstd,
        like if weight is None else weight.contiguous(),
        like if z_bias is None else z_bias.contiguous(),
        like if branch_scale is None else branch_scale.contiguous(),
        dx, d_branch, partial, M, cdiv(cdiv(M, block_m), programs), M // like.shape[0],
        C=C, CA=CA, CB=CB, BLOCK_M=block_m, SUMS=sums, NORM=norm,
        HAS_D_STREAM=d_stream is not None, HAS_WEIGHT=weight is not None,
        HAS_Z_BIAS=z_bias is not None and norm == NORM_BRANCH,
        HAS_SCALE=branch_scale is not None, DX=need_dx, DBRANCH=need_branch,
        DAFFINE=need_affine, DBRANCH_BIAS=need_branch_bias, NUM_STAGES=3, WIDE=M >= 2**31,
        num_warps=num_warps(C),
    )  # fmt: skip
    if need_affine or need_branch_bias:
        sum_partials(partial, outputs, first=0 if need_affine else 2)
    return dx, d_branch, outputs[0], outputs[1], outputs[2]
