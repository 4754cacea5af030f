"""Backward of the 2x2 gather with LayerNorm in Triton: one pass over the map.

    d_out [M, 4C] the rows' gradient    xhat = (gather(x) - mean) * rstd    t = d_out * weight
    dx[token] = (t - mean(t) - xhat * mean(t * xhat)) * rstd     at the token's place in its row

Every token of the map lies in one merged row, so dx is written once and nothing is added up there.
dweight and dbias stay element-wise in registers over a program's rows, are reduced once and added
up by a second kernel in a fixed order (ops/residual_norm): the same bits on every card.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.launch import launch
from fastswin._triton.tiles import cdiv
from fastswin.ops.patch_merging.config import backward_programs, merge_tiles
from fastswin.ops.patch_merging.forward import merge_corner, merged_columns, run_mask
from fastswin.ops.residual_norm.backward import sum_partials


@triton.jit
def _load_gradient(d_out_ptr, row, rows, column, LOWER: tl.constexpr, C: tl.constexpr):
    at = row[:, None].to(tl.int64) * (4 * C) + merged_columns(column, LOWER, C)[None, :]
    keep = rows[:, None] & (column < 2 * C)[None, :]
    return tl.load(d_out_ptr + at, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def _load_weight(weight_ptr, column, LOWER: tl.constexpr, C: tl.constexpr, HAS: tl.constexpr):
    if HAS:
        place = merged_columns(column, LOWER, C)
        return tl.load(weight_ptr + place, mask=column < 2 * C, other=0.0).to(tl.float32)
    else:
        return tl.where(column < 2 * C, 1.0, 0.0)


@triton.jit
def _store_sums(partial_ptr, dw, db, column, LOWER: tl.constexpr, C: tl.constexpr):
    place = merged_columns(column, LOWER, C)
    tl.store(partial_ptr + place, tl.sum(dw, 0), mask=column < 2 * C)
    tl.store(partial_ptr + 4 * C + place, tl.sum(db, 0), mask=column < 2 * C)


@triton.jit(do_not_specialize=["M", "tiles", "H", "W"])
def _gather_layer_norm_bwd_kernel(
    d_out_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, partial_ptr, M, tiles, H, W,
    C: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr, BLOCK_M: tl.constexpr,
    NORM: tl.constexpr, ODD: tl.constexpr, HAS_WEIGHT: tl.constexpr, DX: tl.constexpr,
    DAFFINE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Program p walks over the row tiles p, p + G, ...; u and l: upper and lower run."""
    p = tl.program_id(0)
    ca = tl.arange(0, CA)
    cb = CA + tl.arange(0, CB if CB > 0 else 16)
    CBP: tl.constexpr = CB if CB > 0 else 16
    wua = _load_weight(weight_ptr, ca, 0, C, HAS_WEIGHT)
    wla = _load_weight(weight_ptr, ca, 1, C, HAS_WEIGHT)
    wub = _load_weight(weight_ptr, cb, 0, C, HAS_WEIGHT)
    wlb = _load_weight(weight_ptr, cb, 1, C, HAS_WEIGHT)
    dwua = tl.zeros([BLOCK_M, CA], tl.float32)
    dwla = tl.zeros([BLOCK_M, CA], tl.float32)
    dbua = tl.zeros([BLOCK_M, CA], tl.float32)
    dbla = tl.zeros([BLOCK_M, CA], tl.float32)
    dwub = tl.zeros([BLOCK_M, CBP], tl.float32)
    dwlb = tl.zeros([BLOCK_M, CBP], tl.float32)
    dbub = tl.zeros([BLOCK_M, CBP], tl.float32)
    dblb = tl.zeros([BLOCK_M, CBP], tl.float32)
    for tile in tl.range(0, tiles, num_stages=NUM_STAGES):
        row = (p + tile * tl.num_programs(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
        rows = row < M
        corner, low, right = merge_corner(row, H, W, C)
        low = rows & low
        at_a = corner[:, None] + ca[None, :]
        at_b = corner[:, None] + cb[None, :]
        keep_ua = run_mask(rows, right, ca, C, ODD)
        keep_la = run_mask(low, right, ca, C, ODD)
        keep_ub = run_mask(rows, right, cb, C, ODD)
        keep_lb = run_mask(low, right, cb, C, ODD)
        gua = _load_gradient(d_out_ptr, row, rows, ca, 0, C)
        gla = _load_gradient(d_out_ptr, row, rows, ca, 1, C)
        gub = tl.zeros([BLOCK_M, CBP], tl.float32)
        glb = tl.zeros([BLOCK_M, CBP], tl.float32)
        if CB > 0:
            gub = _load_gradient(d_out_ptr, row, rows, cb, 0, C)
            glb = _load_gradient(d_out_ptr, row, rows, cb, 1, C)
        if NORM:
            mean = tl.load(mean_ptr + row, mask=rows, other=0.0)[:, None]
            rstd = tl.load(rstd_ptr + row, mask=rows, other=0.0)[:, None]
            below = x_ptr + W * C
            hua = tl.load(x_ptr + at_a, mask=keep_ua, other=0.0).to(tl.float32)
            hla = tl.load(below + at_a, mask=keep_la, other=0.0).to(tl.float32)
            hua = (hua - mean) * rstd
            hla = (hla - mean) * rstd
            hub = gub
            hlb = glb
            if CB > 0:
                hub = tl.load(x_ptr + at_b, mask=keep_ub, other=0.0).to(tl.float32)
                hlb = tl.load(below + at_b, mask=keep_lb, other=0.0).to(tl.float32)
                hub = (hub - mean) * rstd
                hlb = (hlb - mean) * rstd
            if DAFFINE:
                dwua += gua * hua
                dwla += gla * hla
                dbua += gua
                dbla += gla
                if CB > 0:
                    dwub += gub * hub
                    dwlb += glb * hlb
                    dbub += gub
                    dblb += glb
            gua *= wua[None, :]
            gla *= wla[None, :]
            mean_t = tl.sum(gua + gla, 1)
            mean_th = tl.sum(gua * hua + gla * hla, 1)
            if CB > 0:
                gub *= wub[None, :]
                glb *= wlb[None, :]
                mean_t += tl.sum(gub + glb, 1)
                mean_th += tl.sum(gub * hub + glb * hlb, 1)
            mean_t = (mean_t / (4 * C))[:, None]
            mean_th = (mean_th / (4 * C))[:, None]
            gua = (gua - mean_t - hua * mean_th) * rstd
            gla = (gla - mean_t - hla * mean_th) * rstd
            if CB > 0:
                gub = (gub - mean_t - hub * mean_th) * rstd
                glb = (glb - mean_t - hlb * mean_th) * rstd
        if DX:
            under = dx_ptr + W * C
            tl.store(dx_ptr + at_a, gua.to(dx_ptr.dtype.element_ty), mask=keep_ua)
            tl.store(under + at_a, gla.to(dx_ptr.dtype.element_ty), mask=keep_la)
            if CB > 0:
                tl.store(dx_ptr + at_b, gub.to(dx_ptr.dtype.element_ty), mask=keep_ub)
                tl.store(under + at_b, glb.to(dx_ptr.dtype.element_ty), mask=keep_lb)
    if DAFFINE:
        out = partial_ptr + p.to(tl.int64) * (8 * C)
        _store_sums(out, dwua, dbua, ca, 0, C)
        _store_sums(out, dwla, dbla, ca, 1, C)
        if CB > 0:
            _store_sums(out, dwub, dbub, cb, 0, C)
            _store_sums(out, dwlb, dblb, cb, 1, C)


def gather_layer_norm_bwd(
    d_out: torch.Tensor,
    x: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
    weight: torch.Tensor | None,
    height: int,
    width: int,
    needs: list[bool],
    x_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch; ``(dx [B, height, width, C], dweight [4C], dbias [4C])``.

    Args:
        x, mean, rstd: of the forward; None where nothing was normalised.
        needs: of dx, and of the affine pair; what is not needed comes back empty.
    """
    d_out = d_out.contiguous()
    B, K, device = d_out.shape[0], d_out.shape[3], d_out.device
    need_dx, need_affine = needs
    dx = torch.empty((B, height, width, K // 4) if need_dx else (0,), dtype=x_dtype, device=device)
    sums = [
        torch.empty(K if need_affine else 0, dtype=torch.float32, device=device) for _ in range(2)
    ]
    if d_out.numel() == 0:
        return dx, sums[0].zero_(), sums[1].zero_()
    tiles = merge_tiles(K // 4)
    rows = d_out.numel() // K
    programs = backward_programs(rows, tiles)
    partial = torch.empty(programs if need_affine else 0, 2, K, dtype=torch.float32, device=device)
    launch(
        _gather_layer_norm_bwd_kernel, programs,
        d_out, d_out if x is None else x.contiguous(), d_out if mean is None else mean,
        d_out if rstd is None else rstd, d_out if weight is None else weight.contiguous(),
        dx, partial, rows, cdiv(cdiv(rows, tiles.BLOCK_M), programs), height, width,
        C=K // 4, CA=tiles.CA, CB=tiles.CB, BLOCK_M=tiles.BLOCK_M, NORM=x is not None,
        ODD=bool(height % 2 or width % 2), HAS_WEIGHT=weight is not None, DX=need_dx,
        DAFFINE=need_affine, NUM_STAGES=3, num_warps=tiles.num_warps,
    )  # fmt: skip
    if need_affine:
        sum_partials(partial, sums)
    return dx, sums[0], sums[1]
