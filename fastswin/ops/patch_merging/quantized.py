"""2x2 gather with LayerNorm into 8 bits, in Triton: what an 8-bit patch merging multiplies.

    x [B, H, W, C] -> out [B, ceil(H/2), ceil(W/2), 4C] int8 or e4m3      marks [B, H/2, W/2] fp32

Memory bound: 2 bytes of x read and one written for each value, as long as a value costs no more
than nine instructions. A program is one warp with a few neighbouring merged tokens of one map row,
so that no sum crosses warps and no token needs a division; the two neighbours of a map row are one
run of 2C channels in two exact parts (384 = 256 + 128), so that nothing is padded.

int8 has no NaN: ``marks`` says 1 of every token, or NaN where one of its four is not finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, on_device
from fastswin._triton.launch import on_grid
from fastswin._triton.math import inverse_step, round_to_8_bits, scale_to_8_bits
from fastswin._triton.pdl import pdl_options, wait_for_previous
from fastswin._triton.tiles import cdiv
from fastswin.ops.patch_merging.config import quantized_merge_tiles
from fastswin.ops.patch_merging.forward import centred_run, merged_columns, run_mask


@triton.jit
def _load_run(
    ptr, offset_ptr, at, mask, column, C: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_M, columns]`` of a run in fp32, the offset on real tokens only."""
    v = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        channel = tl.where(column < C, column, column - C)
        offset = tl.load(offset_ptr + channel, mask=column < 2 * C, other=0.0).to(tl.float32)
        v = tl.where(mask, v + offset[None, :], 0.0)
    return v


@triton.jit
def _store_run(
    out_ptr, v, factor, token, tokens_valid, column, LOWER: tl.constexpr, C: tl.constexpr,
    FINITE: tl.constexpr,
):  # fmt: skip
    if FINITE:
        q = scale_to_8_bits(v, factor, out_ptr.dtype.element_ty)
    else:
        q = round_to_8_bits(v * factor, out_ptr.dtype.element_ty)
    at = token[:, None] * (4 * C) + merged_columns(column, LOWER, C)[None, :]
    tl.store(out_ptr + at, q, mask=tokens_valid[:, None] & (column < 2 * C)[None, :])


@triton.jit(do_not_specialize=["H", "W", "blocks"])
def _gather_quantize_kernel(
    x_ptr, offset_ptr, output_scale_ptr, out_ptr, marks_ptr, H, W, blocks, eps,
    C: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr, BLOCK_M: tl.constexpr,
    NORMALIZE: tl.constexpr, HAS_OFFSET: tl.constexpr, ODD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_M merged tokens of a map row; u and l: upper and lower run."""
    line = tl.program_id(0) // blocks  # merged map rows of all images
    token = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    out_w = (W + 1) // 2
    valid = token < out_w
    upper = 2 * line.to(tl.int64)  # the upper map row, counted over all images
    low = valid
    right = valid
    if ODD:
        out_h = (H + 1) // 2
        upper -= line // out_h * (H % 2)
        low = valid & (line % out_h * 2 + 1 < H)
        right = token * 2 + 1 < W
    x_ptr += upper * W * C
    below = x_ptr + W * C
    out_ptr += line.to(tl.int64) * out_w * (4 * C)
    ca = tl.arange(0, CA)
    cb = CA + tl.arange(0, CB if CB > 0 else 16)
    inverse = inverse_step(tl.load(output_scale_ptr))
    wait_for_previous(PDL)
    at_a = token[:, None] * (2 * C) + ca[None, :]
    at_b = token[:, None] * (2 * C) + cb[None, :]
    keep, keep_low = run_mask(valid, right, ca, C, ODD), run_mask(low, right, ca, C, ODD)
    ua = _load_run(x_ptr, offset_ptr, at_a, keep, ca, C, HAS_OFFSET)
    la = _load_run(below, offset_ptr, at_a, keep_low, ca, C, HAS_OFFSET)
    ub, lb = ua, la
    if CB > 0:
        keep, keep_low = run_mask(valid, right, cb, C, ODD), run_mask(low, right, cb, C, ODD)
        ub = _load_run(x_ptr, offset_ptr, at_b, keep, cb, C, HAS_OFFSET)
        lb = _load_run(below, offset_ptr, at_b, keep_low, cb, C, HAS_OFFSET)
    factor = tl.zeros([BLOCK_M], tl.float32) + inverse
    if NORMALIZE:
        total = tl.sum(ua + la, 1)
        if CB > 0:
            total += tl.sum(ub + lb, 1)
        mean = (total / (4 * C))[:, None]
        ua = centred_run(ua, mean, ca, C, CA)
        la = centred_run(la, mean, ca, C, CA)
        square = tl.sum(ua * ua + la * la, 1)
        if CB > 0:
            ub -= mean
            lb -= mean
            square += tl.sum(ub * ub + lb * lb, 1)
        rstd = 1.0 / tl.sqrt(square / (4 * C) + eps)
        factor *= rstd  # one product a value: a step off at most where it rounds at a half
        mark = rstd
    elif marks_ptr is not None:
        mark = tl.sum(ua * 0.0 + la * 0.0, 1)
        if CB > 0:
            mark += tl.sum(ub * 0.0 + lb * 0.0, 1)
    if marks_ptr is not None:
        tl.store(marks_ptr + line.to(tl.int64) * out_w + token, mark * 0.0 + 1.0, mask=valid)
    finite: tl.constexpr = marks_ptr is not None  # what lies in a marked row is never read as such
    column_factor = factor[:, None]
    _store_run(out_ptr, ua, column_factor, token, valid, ca, 0, C, finite)
    _store_run(out_ptr, la, column_factor, token, valid, ca, 1, C, finite)
    if CB > 0:
        _store_run(out_ptr, ub, column_factor, token, valid, cb, 0, C, finite)
        _store_run(out_ptr, lb, column_factor, token, valid, cb, 1, C, finite)


def gather_quantize_fwd(
    x: torch.Tensor,
    eps: float | None,
    offset: torch.Tensor | None,
    output_scale: torch.Tensor,
    dtype: torch.dtype,
    marks: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Launch on ``x [B, H, W, C]``; see ``ops.gather_neighbours``."""
    x = x.contiguous()
    B, H, W, C = x.shape
    out_h, out_w = (H + 1) // 2, (W + 1) // 2
    out = torch.empty(B, out_h, out_w, 4 * C, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    tiles = quantized_merge_tiles(C, out_w)
    blocks = cdiv(out_w, tiles.BLOCK_M)
    with on_device(x.device):
        on_grid(_gather_quantize_kernel, (B * out_h * blocks,))(
            x, x if offset is None else offset, output_scale, out, marks, H, W, blocks,
            0.0 if eps is None else eps, C=C, CA=tiles.CA, CB=tiles.CB, BLOCK_M=tiles.BLOCK_M,
            NORMALIZE=eps is not None, HAS_OFFSET=offset is not None, ODD=bool(H % 2 or W % 2),
            num_warps=tiles.num_warps, **pdl_options(pdl, device_capability(x.device)),
        )  # fmt: skip
    return out
