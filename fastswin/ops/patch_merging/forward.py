"""2x2 gather with LayerNorm in Triton: for inference (no affine) and for training.

    x [B, H, W, C] -> out [B, ceil(H/2), ceil(W/2), 4C]      mean, rstd [B, H/2, W/2] for backward

Memory bound: x read once, out (as many bytes) written once. One program holds the
four neighbours of a few output tokens, so the statistics over 4C need no second pass over memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, on_device
from fastswin._triton.launch import launch, on_grid
from fastswin._triton.pdl import pdl_options, wait_for_previous
from fastswin._triton.tiles import cdiv, next_power_of_2
from fastswin.ops.patch_merging.config import merge_tiles

#: Elements of one neighbour tile held in registers (four of them are).
TILE_ELEMENTS = 1024


@triton.jit
def _neighbour(
    x_ptr, offset_ptr, row, col, channel, in_map, H, W, C: tl.constexpr, HAS_OFFSET: tl.constexpr
):  # fmt: skip
    """One neighbour ``[BLOCK_M, BLOCK_C]`` in fp32; zeros outside the map."""
    valid = (in_map & (row < H) & (col < W))[:, None] & (channel < C)[None, :]
    at = (row * W + col)[:, None] * C + channel[None, :]
    v = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        offset = tl.load(offset_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)
        v = tl.where(valid, v + offset[None, :], 0.0)
    return v


@triton.jit
def _gather_neighbours_fwd_kernel(
    x_ptr, offset_ptr, out_ptr, H, W, tokens, blocks_per_image, eps,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
    NORMALIZE: tl.constexpr, HAS_OFFSET: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program per BLOCK_M output tokens of one image."""
    pid = tl.program_id(0)
    image = (pid // blocks_per_image).to(tl.int64)
    token = pid % blocks_per_image * BLOCK_M + tl.arange(0, BLOCK_M)
    in_map = token < tokens
    out_w = (W + 1) // 2
    row = token // out_w * 2
    col = token % out_w * 2
    channel = tl.arange(0, BLOCK_C)
    x_ptr += image * H * W * C
    out_ptr += image * tokens * (4 * C)
    wait_for_previous(PDL)
    a = _neighbour(x_ptr, offset_ptr, row, col, channel, in_map, H, W, C, HAS_OFFSET)
    b = _neighbour(x_ptr, offset_ptr, row + 1, col, channel, in_map, H, W, C, HAS_OFFSET)
    c = _neighbour(x_ptr, offset_ptr, row, col + 1, channel, in_map, H, W, C, HAS_OFFSET)
    d = _neighbour(x_ptr, offset_ptr, row + 1, col + 1, channel, in_map, H, W, C, HAS_OFFSET)
    if NORMALIZE:
        real = (channel < C)[None, :]
        mean = (tl.sum(a + b + c + d, 1) / (4 * C))[:, None]
        a = tl.where(real, a - mean, 0.0)
        b = tl.where(real, b - mean, 0.0)
        c = tl.where(real, c - mean, 0.0)
        d = tl.where(real, d - mean, 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(a * a + b * b + c * c + d * d, 1) / (4 * C) + eps)[:, None]
        a = a * rstd
        b = b * rstd
        c = c * rstd
        d = d * rstd
    keep = in_map[:, None] & (channel < C)[None, :]
    at = out_ptr + token[:, None] * (4 * C) + channel[None, :]
    tl.store(at, a.to(out_ptr.dtype.element_ty), mask=keep)
    tl.store(at + C, b.to(out_ptr.dtype.element_ty), mask=keep)
    tl.store(at + 2 * C, c.to(out_ptr.dtype.element_ty), mask=keep)
    tl.store(at + 3 * C, d.to(out_ptr.dtype.element_ty), mask=keep)


def gather_neighbours_fwd(
    x: torch.Tensor,
    eps: float | None,
    offset: torch.Tensor | None,
    pdl: bool = False,
) -> torch.Tensor:
    """Launch on ``x [B, H, W, C]``; see the public function."""
    x = x.contiguous()
    B, H, W, C = x.shape
    out_h, out_w = (H + 1) // 2, (W + 1) // 2
    out = torch.empty(B, out_h, out_w, 4 * C, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block_c = next_power_of_2(C)
    block_m = max(1, min(16, TILE_ELEMENTS // block_c))
    blocks_per_image = cdiv(out_h * out_w, block_m)
    with on_device(x.device):
        on_grid(_gather_neighbours_fwd_kernel, (B * blocks_per_image,))(
            x, x if offset is None else offset, out, H, W, out_h * out_w, blocks_per_image,
            0.0 if eps is None else eps, C=C, BLOCK_C=block_c, BLOCK_M=block_m,
            NORMALIZE=eps is not None, HAS_OFFSET=offset is not None, num_warps=4,
            **pdl_options(pdl, device_capability(x.device)),
        )  # fmt: skip
    return out


@triton.jit
def merge_corner(row, H, W, C: tl.constexpr):
    """Where the upper left neighbour of merged rows lies; whether a lower and a right one exist.

    Rows are counted in 32 bits: four divisions in 64 would cost as much as all the rest.
    """
    out_w = (W + 1) // 2
    tokens = (H + 1) // 2 * out_w
    token = row % tokens
    top = token // out_w * 2
    left = token % out_w * 2
    corner = (((row // tokens).to(tl.int64) * H + top) * W + left) * C
    return corner, top + 1 < H, left + 1 < W


@triton.jit
def run_mask(rows, right, column, C: tl.constexpr, ODD: tl.constexpr):
    """Which of ``[BLOCK_M, columns]`` of a run of 2C channels are in the map."""
    keep = rows[:, None] & (column < 2 * C)[None, :]
    if ODD:
        keep = keep & ((column < C)[None, :] | right[:, None])
    return keep


@triton.jit
def merged_columns(column, LOWER: tl.constexpr, C: tl.constexpr):
    """Columns of the merged row: (even row, even column), (odd, even), (even, odd), (odd, odd)."""
    # the compiler does not see through the choice: without the hint it goes element by element
    NEIGHBOURS: tl.constexpr = 16 if C % 16 == 0 else (8 if C % 8 == 0 else 1)
    place = column + LOWER * C + tl.where(column < C, 0, C)
    return tl.max_contiguous(tl.multiple_of(place, NEIGHBOURS), NEIGHBOURS)


@triton.jit
def centred_run(v, mean, column, C: tl.constexpr, CA: tl.constexpr):
    """``v - mean`` of a run's part, 0 where it is padded past its 2C channels."""
    v = v - mean
    if CA > 2 * C:  # padded columns must not enter the sums; padded neighbours do, as zeros
        v = tl.where((column < 2 * C)[None, :], v, 0.0)
    return v


@triton.jit
def _store_run(
    out_ptr, weight_ptr, bias_ptr, v, row, rows, column, LOWER: tl.constexpr, C: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    place = merged_columns(column, LOWER, C)
    real = column < 2 * C
    if HAS_WEIGHT:
        v = v * tl.load(weight_ptr + place, mask=real, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        v = v + tl.load(bias_ptr + place, mask=real, other=0.0).to(tl.float32)[None, :]
    at = row[:, None].to(tl.int64) * (4 * C) + place[None, :]
    tl.store(out_ptr + at, v.to(out_ptr.dtype.element_ty), mask=rows[:, None] & real[None, :])


@triton.jit(do_not_specialize=["M", "H", "W"])
def _gather_layer_norm_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, rstd_ptr, M, H, W, eps,
    C: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr, BLOCK_M: tl.constexpr,
    NORM: tl.constexpr, ODD: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_M merged rows; u and l: upper and lower run, a and b: their parts."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = row < M
    corner, low, right = merge_corner(row, H, W, C)
    low = rows & low
    ca = tl.arange(0, CA)
    cb = CA + tl.arange(0, CB if CB > 0 else 16)
    at_a = corner[:, None] + ca[None, :]
    at_b = corner[:, None] + cb[None, :]
    below = x_ptr + W * C
    ua = tl.load(x_ptr + at_a, mask=run_mask(rows, right, ca, C, ODD), other=0.0).to(tl.float32)
    la = tl.load(below + at_a, mask=run_mask(low, right, ca, C, ODD), other=0.0).to(tl.float32)
    ub, lb = ua, la
    if CB > 0:
        ub = tl.load(x_ptr + at_b, mask=run_mask(rows, right, cb, C, ODD), other=0.0)
        lb = tl.load(below + at_b, mask=run_mask(low, right, cb, C, ODD), other=0.0)
        ub = ub.to(tl.float32)
        lb = lb.to(tl.float32)
    if NORM:
        total = tl.sum(ua + la, 1)
        if CB > 0:
            total += tl.sum(ub + lb, 1)
        mean = total / (4 * C)
        ua = centred_run(ua, mean[:, None], ca, C, CA)
        la = centred_run(la, mean[:, None], ca, C, CA)
        square = tl.sum(ua * ua + la * la, 1)
        if CB > 0:
            ub -= mean[:, None]
            lb -= mean[:, None]
            square += tl.sum(ub * ub + lb * lb, 1)
        rstd = 1.0 / tl.sqrt(square / (4 * C) + eps)
        tl.store(mean_ptr + row, mean, mask=rows)
        tl.store(rstd_ptr + row, rstd, mask=rows)
        ua *= rstd[:, None]
        la *= rstd[:, None]
        if CB > 0:
            ub *= rstd[:, None]
            lb *= rstd[:, None]
    _store_run(out_ptr, weight_ptr, bias_ptr, ua, row, rows, ca, 0, C, HAS_WEIGHT, HAS_BIAS)
    _store_run(out_ptr, weight_ptr, bias_ptr, la, row, rows, ca, 1, C, HAS_WEIGHT, HAS_BIAS)
    if CB > 0:
        _store_run(out_ptr, weight_ptr, bias_ptr, ub, row, rows, cb, 0, C, HAS_WEIGHT, HAS_BIAS)
        _store_run(out_ptr, weight_ptr, bias_ptr, lb, row, rows, cb, 1, C, HAS_WEIGHT, HAS_BIAS)


def gather_layer_norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    norm: bool,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch on ``x [B, H, W, C]``; ``(rows, mean, rstd)``, the statistics empty without a norm."""
    x = x.contiguous()
    B, H, W, C = x.shape
    merged = (B, (H + 1) // 2, (W + 1) // 2)
    out = torch.empty(*merged, 4 * C, dtype=out_dtype, device=x.device)
    mean = torch.empty(merged if norm else (0,), dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    if out.numel() == 0:
        return out, mean, rstd
    tiles = merge_tiles(C)
    rows = out.numel() // (4 * C)
    launch(
        _gather_layer_norm_fwd_kernel, cdiv(rows, tiles.BLOCK_M),
        x, x if weight is None else weight.contiguous(), x if bias is None else bias.contiguous(),
        out, mean, rstd, rows, H, W, eps,
        C=C, CA=tiles.CA, CB=tiles.CB, BLOCK_M=tiles.BLOCK_M, NORM=norm,
        ODD=bool(H % 2 or W % 2), HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
        num_warps=tiles.num_warps,
    )  # fmt: skip
    return out, mean, rstd
