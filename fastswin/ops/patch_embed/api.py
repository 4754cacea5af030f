"""Public patch embedding: validation and dispatch."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from fastswin._triton.available import (
    Impl,
    choose_impl,
    why_no_gradient,
    why_no_tensor_cores,
    why_not_triton,
)
from fastswin._triton.tiles import MIN_DOT, cdiv, split_columns
from fastswin.ops.linear.stats import check_row_stats, write_stats_ref

MAX_CHANNELS = 512
MAX_PATCH_ELEMENTS = 256


def patch_embed_blocker(C: int, patch_elements: int) -> str | None:
    """Reason why the kernel cannot take ``C`` output channels or this patch, None where it can."""
    if split_columns(C) is None or C > MAX_CHANNELS:
        return f"{C} channels are not one or two powers of two in [{MIN_DOT}, {MAX_CHANNELS}]"
    if patch_elements > MAX_PATCH_ELEMENTS:
        return f"{patch_elements} values a patch exceed {MAX_PATCH_ELEMENTS}"
    return None


def patch_embed(
    images: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
    impl: Impl = "auto",
    pdl: bool = False,
    input_precision: Literal["tf32x3"] | None = None,
    stats_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Non-overlapping patches projected to tokens, then LayerNorm: images to ``[B, H, W, C]``.

    Args:
        images: ``[B, c, h, w]`` in any float dtype and strides; sides that are no multiple of the
            patch are zero-padded at the bottom and right.
        weight: ``[C, c, p, p]``, the convolution's.
        bias: ``[C]``.
        norm_weight, norm_bias: ``[C]`` of the LayerNorm; None leaves it out.
        eps: LayerNorm epsilon.
        dtype: of the tokens and of the product; None means the images'.
        impl: "auto", "triton" or "reference".
        pdl: programmatic dependent launch (_triton/pdl.py), where no kernel in flight writes a
            weight.
        input_precision: "tf32x3" makes an fp32 product of three TF32 ones, with fp32's error; None
            multiplies in fp32.
        stats_out: fp32 ``[2, 1, B * H * W]`` where the tokens' statistics go (ops/linear/stats.py),
            for a LayerNorm behind the next product; None leaves them out.

    Returns:
        ``[B, ceil(h / p), ceil(w / p), C]``.

    Raises:
        ValueError: a shape or choice does not fit; the message names the argument.
    """
    C, channels, patch, _ = weight.shape
    if images.ndim != 4 or images.shape[1] != channels:
        raise ValueError(f"images must be [B, {channels}, h, w], got {tuple(images.shape)}")
    if (norm_weight is None) != (norm_bias is None):
        raise ValueError("give norm_weight and norm_bias together or not at all")
    if input_precision not in (None, "tf32x3"):
        raise ValueError(f"input_precision must be None or 'tf32x3', got {input_precision!r}")
    dtype = dtype or images.dtype
    if stats_out is not None:
        tokens = images.shape[0] * cdiv(images.shape[2], patch) * cdiv(images.shape[3], patch)
        check_row_stats("stats_out", stats_out, tokens, C, dtype, 1)
    fp32_form = input_precision if dtype == torch.float32 else None
    chosen = choose_impl(
        impl,
        "patch_embed",
        [
            why_not_triton(images.device, dtype),
            why_no_gradient(images, weight, bias, norm_weight, norm_bias),
            why_not_triton(images.device, images.dtype),
            None if fp32_form is None else why_no_tensor_cores(images.device, dtype, True),
            patch_embed_blocker(C, channels * patch * patch),
        ],
    )
    if chosen == "reference":
        y = _patch_embed_ref(images, weight, bias, norm_weight, norm_bias, eps, dtype)
        if stats_out is not None:
            write_stats_ref(y, stats_out)
        return y
    from fastswin.ops.patch_embed.forward import patch_embed_fwd

    return patch_embed_fwd(
        images, weight, bias, norm_weight, norm_bias, eps, dtype, pdl, fp32_form, stats_out
    )  # fmt: skip


def _patch_embed_ref(
    images: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    patch = weight.shape[2]
    images = F.pad(images, (0, -images.shape[3] % patch, 0, -images.shape[2] % patch))
    x = F.conv2d(images.to(dtype), weight.to(dtype), bias.to(dtype), stride=patch)
    x = x.permute(0, 2, 3, 1)
    if norm_weight is None or norm_bias is None:
        return x.contiguous()
    compute = torch.promote_types(dtype, torch.float32)
    shape = (weight.shape[0],)
    y = F.layer_norm(x.to(compute), shape, norm_weight.to(compute), norm_bias.to(compute), eps)
    return y.to(dtype).contiguous()
