"""2x2 gather (+ LayerNorm without affine) in Triton.

    x [B, H, W, C] -> out [B, ceil(H/2), ceil(W/2), 4C]

Memory bound: x read once, out (as many bytes, or 8-bit) written once. One program holds the
four neighbours of a few output tokens, so the statistics over 4C need no second pass over memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, on_device
from fastswin._triton.math import inverse_step, round_to_8_bits
from fastswin._triton.pdl import launch_dependents, pdl_options, wait_for_previous
from fastswin._triton.tiles import cdiv, next_power_of_2

#: Elements of one neighbour tile held in registers (four of them are).
TILE_ELEMENTS = 1024


@triton.jit
def _neighbour(
    x_ptr, offset_ptr, row, col, channel, in_map, H, W, C: tl.constexpr, HAS_OFFSET: tl.constexpr,
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
    NORMALIZE: tl.constexpr, HAS_OFFSET: tl.constexpr, output_scale_ptr=None,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """One program per BLOCK_M output tokens of one image; 8 bits with the step given."""
    launch_dependents(PDL)
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
    if output_scale_ptr is not None:
        inverse = inverse_step(tl.load(output_scale_ptr))
        a = round_to_8_bits(a * inverse, out_ptr.dtype.element_ty)
        b = round_to_8_bits(b * inverse, out_ptr.dtype.element_ty)
        c = round_to_8_bits(c * inverse, out_ptr.dtype.element_ty)
        d = round_to_8_bits(d * inverse, out_ptr.dtype.element_ty)
    tl.store(at, a.to(out_ptr.dtype.element_ty), mask=keep)
    tl.store(at + C, b.to(out_ptr.dtype.element_ty), mask=keep)
    tl.store(at + 2 * C, c.to(out_ptr.dtype.element_ty), mask=keep)
    tl.store(at + 3 * C, d.to(out_ptr.dtype.element_ty), mask=keep)


def gather_neighbours_fwd(
    x: torch.Tensor,
    eps: float | None,
    offset: torch.Tensor | None,
    output_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Launch on ``x [B, H, W, C]``; see the public function. ``dtype``: of the result."""
    x = x.contiguous()
    B, H, W, C = x.shape
    out_h, out_w = (H + 1) // 2, (W + 1) // 2
    out = torch.empty(B, out_h, out_w, 4 * C, dtype=dtype or x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block_c = next_power_of_2(C)
    block_m = max(1, min(16, TILE_ELEMENTS // block_c))
    blocks_per_image = cdiv(out_h * out_w, block_m)
    with on_device(x.device):
        _gather_neighbours_fwd_kernel[(B * blocks_per_image,)](
            x, x if offset is None else offset, out, H, W, out_h * out_w, blocks_per_image,
            0.0 if eps is None else eps, C=C, BLOCK_C=block_c, BLOCK_M=block_m,
            NORMALIZE=eps is not None, HAS_OFFSET=offset is not None,
            output_scale_ptr=output_scale, num_warps=4,
            **pdl_options(pdl, device_capability(x.device)),
        )  # fmt: skip
    return out
