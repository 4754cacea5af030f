"""Patch embedding in Triton: a strided convolution is a product over ``c * p * p`` values.

    images [B, c, h, w]   weight [C, c, p, p]   out [B, H, W, C]   stats [2, 1, B H W] fp32
    (ops/linear/stats.py), of the rows as they are stored, where the first reader wants them

2 * c p p * C FLOPs a token (48 * C for 4x4 RGB) against 2 * (c p p + C) bytes: memory bound. The
image is read through its strides, in its own dtype, padded and converted on the way, and LayerNorm
finishes the row before its only store. LayerNorm is applied to the fp32 accumulator. fp32 products
without tensor cores spill and take 0.17 ms for 32 images, of three TF32 ones 0.04 (H200); the bytes
take 0.015.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, on_device
from fastswin._triton.launch import on_grid
from fastswin._triton.math import normalize_rows, row_moments
from fastswin._triton.pdl import pdl_options, wait_for_previous
from fastswin._triton.tiles import MIN_DOT, cdiv, next_power_of_2, split_columns


@triton.jit
def _patch_embed_fwd_kernel(
    image_ptr, weight_ptr, bias_ptr, norm_weight_ptr, norm_bias_ptr, out_ptr, stats_ptr, rows,
    image_h, image_w, W, tokens, blocks_per_image, stride_b, stride_c, stride_h, stride_w, eps,
    PATCH: tl.constexpr, ELEMENTS: tl.constexpr, BLOCK_K: tl.constexpr,
    CA: tl.constexpr, CB: tl.constexpr, BLOCK_M: tl.constexpr, HAS_NORM: tl.constexpr,
    WRITE_STATS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program per BLOCK_M tokens of one image."""
    C: tl.constexpr = CA + CB
    pid = tl.program_id(0)
    image = (pid // blocks_per_image).to(tl.int64)
    token = pid % blocks_per_image * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = token < tokens
    k = tl.arange(0, BLOCK_K)
    y = (token // W * PATCH)[:, None] + (k // PATCH % PATCH)[None, :]
    x = (token % W * PATCH)[:, None] + (k % PATCH)[None, :]
    inside = valid[:, None] & (k < ELEMENTS)[None, :] & (y < image_h) & (x < image_w)
    at = (k // (PATCH * PATCH))[None, :] * stride_c + y * stride_h + x * stride_w
    ca = tl.arange(0, CA)
    cb = CA + tl.arange(0, CB if CB > 0 else 16)
    in_patch = (k < ELEMENTS)[None, :]
    w = tl.load(weight_ptr + ca[:, None] * ELEMENTS + k[None, :], mask=in_patch, other=0.0)
    # all that is learnt is asked for together, before the wait: each late load waits for memory
    bias_a = tl.load(bias_ptr + ca).to(tl.float32)
    if CB > 0:
        w_b = tl.load(weight_ptr + cb[:, None] * ELEMENTS + k[None, :], mask=in_patch, other=0.0)
        bias_b = tl.load(bias_ptr + cb).to(tl.float32)
    if HAS_NORM:
        gain_a = tl.load(norm_weight_ptr + ca).to(tl.float32)
        shift_a = tl.load(norm_bias_ptr + ca).to(tl.float32)
        if CB > 0:
            gain_b = tl.load(norm_weight_ptr + cb).to(tl.float32)
            shift_b = tl.load(norm_bias_ptr + cb).to(tl.float32)
    wait_for_previous(PDL)  # also of the writes below: the memory may be an earlier kernel's
    pixels = tl.load(image_ptr + image * stride_b + at, mask=inside, other=0.0)
    pixels = pixels.to(weight_ptr.dtype.element_ty)
    a = tl.dot(pixels, tl.trans(w), input_precision=PRECISION)
    a += bias_a[None, :]
    b = a
    if CB > 0:
        b = tl.dot(pixels, tl.trans(w_b), input_precision=PRECISION)
        b += bias_b[None, :]
    if HAS_NORM:
        a, b = normalize_rows(a, b, C, CB, eps)
        a = a * gain_a[None, :]
        a += shift_a[None, :]
        if CB > 0:
            b = b * gain_b[None, :]
            b += shift_b[None, :]
    to = out_ptr + image * tokens * C + token[:, None] * C
    a = a.to(out_ptr.dtype.element_ty)
    tl.store(to + ca[None, :], a, mask=valid[:, None])
    if CB > 0:
        b = b.to(out_ptr.dtype.element_ty)
        tl.store(to + cb[None, :], b, mask=valid[:, None])
    if WRITE_STATS:
        mean, squares = row_moments(a.to(tl.float32), b.to(tl.float32), C, CB)
        at_row = stats_ptr + image * tokens + token
        tl.store(at_row, mean, mask=valid)
        tl.store(at_row + rows, squares, mask=valid)


def patch_embed_fwd(
    images: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
    pdl: bool = False,
    input_precision: str | None = None,
    stats_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch on ``images [B, c, h, w]`` of any strides; see the public function."""
    B, channels, image_h, image_w = images.shape
    C, _, patch, _ = weight.shape
    H, W = cdiv(image_h, patch), cdiv(image_w, patch)
    out = torch.empty(B, H, W, C, device=images.device, dtype=dtype)
    if out.numel() == 0:
        return out
    columns = split_columns(C)
    assert columns is not None  # the public function asked before
    elements = channels * patch * patch
    block_m, num_warps = 64 if C <= 128 else 32, 4
    if input_precision is not None and C > 128:  # twice the operands of a half-precision product
        block_m, num_warps = 64 if C <= 192 else 32, 8
    if device_capability(images.device) < (8, 0):  # no tensor-core code there
        block_m, num_warps = MIN_DOT, 8 if C <= 128 else 16
    blocks_per_image = cdiv(H * W, block_m)
    with on_device(images.device):
        on_grid(_patch_embed_fwd_kernel, (B * blocks_per_image,))(
            images, weight.to(dtype).contiguous(), bias,
            bias if norm_weight is None else norm_weight, bias if norm_bias is None else norm_bias,
            out, out if stats_out is None else stats_out, B * H * W,
            image_h, image_w, W, H * W, blocks_per_image, *images.stride(), eps,
            PATCH=patch, ELEMENTS=elements, BLOCK_K=max(MIN_DOT, next_power_of_2(elements)),
            CA=columns[0], CB=columns[1], BLOCK_M=block_m, HAS_NORM=norm_weight is not None,
            WRITE_STATS=stats_out is not None, PRECISION=input_precision or "ieee",
            num_warps=num_warps,
            **pdl_options(pdl, device_capability(images.device)),
        )  # fmt: skip
    return out
