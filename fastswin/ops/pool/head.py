"""Final LayerNorm, mean over tokens and classifier in one Triton kernel, for few images.

    x [B, T, C]   head [classes, C]   out [B, classes]

Each program normalises and averages a whole image (75 KB at 49 x 768, from L2) and multiplies the
mean with its strip of the head, which it has loaded before it waits for the kernel in front
(_triton/pdl.py). That repeats the pooling in every program: a microsecond of L2 traffic at batch 1
instead of two launches, more than it saves from a few images up. Sums in fp32, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, on_device
from fastswin._triton.launch import on_grid
from fastswin._triton.pdl import pdl_options, wait_for_previous
from fastswin._triton.tiles import cdiv, next_power_of_2

#: Classes of one program: 1,000 classes make 125 programs.
BLOCK_N = 8

#: Elements of one tile of tokens.
TILE_ELEMENTS = 8192


@triton.jit
def _norm_pool_head_kernel(
    x_ptr, offset_ptr, weight_ptr, bias_ptr, head_ptr, head_bias_ptr, out_ptr, T, N, eps,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_HEAD_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per (image, BLOCK_N classes)."""
    image = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_C)
    real = channel < C
    strip = head_ptr + col[:, None].to(tl.int64) * C + channel[None, :]
    head = tl.load(strip, mask=(col < N)[:, None] & real[None, :], other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + channel, mask=real, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, mask=real, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        offset = tl.load(offset_ptr + channel, mask=real, other=0.0).to(tl.float32)
    if HAS_HEAD_BIAS:
        head_bias = tl.load(head_bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    total = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, T, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        valid = (token < T)[:, None] & real[None, :]
        at = x_ptr + (image * T + token)[:, None] * C + channel[None, :]
        x = tl.load(at, mask=valid, other=0.0).to(tl.float32)
        if HAS_OFFSET:
            x += offset[None, :]
        mean = tl.sum(tl.where(valid, x, 0.0), 1) / C
        x = tl.where(valid, x - mean[:, None], 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / C + eps)
        total += tl.sum(x * rstd[:, None], 0)
    pooled = total / T * weight + bias
    y = tl.sum(head * pooled[None, :], 1)
    if HAS_HEAD_BIAS:
        y += head_bias
    tl.store(out_ptr + image * N + col, y.to(out_ptr.dtype.element_ty), mask=col < N)


def norm_pool_head_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    head_weight: torch.Tensor,
    head_bias: torch.Tensor | None,
    eps: float,
    offset: torch.Tensor | None,
    pdl: bool = False,
) -> torch.Tensor:
    """Launch on ``x [B, H, W, C]``; see the public function."""
    x = x.contiguous()
    B, H, W, C = x.shape
    N = head_weight.shape[0]
    out = x.new_empty(B, N)
    if out.numel() == 0:
        return out
    block_c = next_power_of_2(C)
    block_t = max(1, min(next_power_of_2(H * W), TILE_ELEMENTS // block_c))
    with on_device(x.device):
        on_grid(_norm_pool_head_kernel, (B, cdiv(N, BLOCK_N)))(
            x, x if offset is None else offset, weight, bias, head_weight.contiguous(),
            bias if head_bias is None else head_bias, out, H * W, N, eps,
            C=C, BLOCK_C=block_c, BLOCK_T=block_t, BLOCK_N=BLOCK_N, HAS_OFFSET=offset is not None,
            HAS_HEAD_BIAS=head_bias is not None, num_warps=8,
            **pdl_options(pdl, device_capability(x.device)),
        )  # fmt: skip
    return out
