"""Final LayerNorm + mean over tokens in Triton, in two deterministic stages.

    x [B, T, C] -> partial [B, S, C] fp32 -> out [B, C]

The mean of an affine is the affine of the mean, so stage one sums normalised rows and stage two
applies weight and bias. One program per image would leave most of the card idle at small batch
(24 us at every batch when tried), so an image's tokens are spread over S programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, on_device
from fastswin._triton.launch import on_grid
from fastswin._triton.pdl import pdl_options, wait_for_previous
from fastswin._triton.tiles import cdiv, next_power_of_2

#: Elements of one tile of rows.
TILE_ELEMENTS = 4096


@triton.jit
def _norm_sum_kernel(
    x_ptr, offset_ptr, partial_ptr, T, splits, eps,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, HAS_OFFSET: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """One program per (image, split): sum of BLOCK_T normalised rows."""
    pid = tl.program_id(0)
    image = (pid // splits).to(tl.int64)
    token = pid % splits * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.arange(0, BLOCK_C)
    valid = (token < T)[:, None] & (channel < C)[None, :]
    at = x_ptr + (image * T * C + token[:, None] * C + channel[None, :])
    wait_for_previous(PDL)
    x = tl.load(at, mask=valid, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        x += tl.load(offset_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    mean = tl.sum(tl.where(valid, x, 0.0), 1) / C
    x = tl.where(valid, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / C + eps)
    total = tl.sum(x * rstd[:, None], 0)
    tl.store(partial_ptr + pid.to(tl.int64) * C + channel, total, mask=channel < C)


@triton.jit
def _mean_affine_kernel(
    partial_ptr, weight_ptr, bias_ptr, out_ptr, T, splits, C: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program per (image, block of channels): adds the splits in a fixed order."""
    image = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = channel < C
    weight = tl.load(weight_ptr + channel, mask=valid, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, mask=valid, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    total = tl.zeros([BLOCK_C], tl.float32)
    for first in range(0, splits, BLOCK_S):  # side by side: one latency for as many
        split = first + tl.arange(0, BLOCK_S)
        at = (image * splits + split)[:, None] * C + channel[None, :]
        mask = (split < splits)[:, None] & valid[None, :]
        total += tl.sum(tl.load(partial_ptr + at, mask=mask, other=0.0), 0)
    y = total / T * weight + bias
    tl.store(out_ptr + image * C + channel, y.to(out_ptr.dtype.element_ty), mask=valid)


def norm_pool_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    offset: torch.Tensor | None,
    pdl: bool = False,
) -> torch.Tensor:
    """Launch on ``x [B, H, W, C]``; see the public function."""
    x = x.contiguous()
    B, H, W, C = x.shape
    out = x.new_empty(B, C)
    if out.numel() == 0:
        return out
    T = H * W
    block_c = next_power_of_2(C)
    block_t = max(1, min(next_power_of_2(T), TILE_ELEMENTS // block_c))
    splits = cdiv(T, block_t)
    block_s = max(16, min(64, next_power_of_2(splits)))
    sums = torch.empty(B * splits, C, device=x.device, dtype=torch.float32)
    options = pdl_options(pdl, device_capability(x.device))
    with on_device(x.device):
        on_grid(_norm_sum_kernel, (B * splits,))(
            x, x if offset is None else offset, sums, T, splits, eps,
            C=C, BLOCK_C=block_c, BLOCK_T=block_t, HAS_OFFSET=offset is not None,
            num_warps=4, **options,
        )  # fmt: skip
        on_grid(_mean_affine_kernel, (B, cdiv(C, 128)))(
            sums, weight, bias, out, T, splits, C=C, BLOCK_C=128, BLOCK_S=block_s,
            num_warps=4, **options,
        )  # fmt: skip
    return out
