"""The split product and its joining in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastswin.ops.quantize.reference import quantize_ref


def split_k_linear_ref(
    x: torch.Tensor, weight: torch.Tensor, splits: int, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """``[splits, ..., N]`` fp32 (fp64 of fp64): one product per slice of K, times ``scale``."""
    one_byte = x.element_size() == 1  # int8: 512 products at most are summed exactly in fp32
    compute = torch.float32 if one_byte else torch.promote_types(x.dtype, torch.float32)
    width = weight.shape[1] // splits
    parts = zip(x.split(width, -1), weight.split(width, 1), strict=True)
    y = torch.stack([F.linear(a.to(compute), b.to(compute)) for a, b in parts])
    return y if scale is None else y * scale


def add_split_k_ref(
    partials: torch.Tensor,
    stream: torch.Tensor,
    bias: torch.Tensor | None,
    norm: str,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    output_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """As :func:`fastswin.ops.add_split_k`; writes ``stream``."""
    compute = partials.dtype
    total = partials.sum(0)
    if bias is not None:
        total = total + bias.to(compute)
    if norm == "post":
        weight = None if norm_weight is None else norm_weight.to(compute)
        shift = None if norm_bias is None else norm_bias.to(compute)
        total = F.layer_norm(total, total.shape[-1:], weight, shift, eps)
    total = total + stream.to(compute)
    stream.copy_(total)
    if norm != "pre":
        return None
    y = F.layer_norm(total, total.shape[-1:], None, None, eps)
    if output_scale is not None and dtype is not None:
        return quantize_ref(y, output_scale, dtype)
    return y.to(stream.dtype)
