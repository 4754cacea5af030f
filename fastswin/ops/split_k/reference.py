"""The split product and its joining in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def split_k_linear_ref(x: torch.Tensor, weight: torch.Tensor, splits: int) -> torch.Tensor:
    """``[splits, ..., N]`` fp32 (fp64 of fp64): one product per slice of K."""
    compute = torch.promote_types(x.dtype, torch.float32)
    width = weight.shape[1] // splits
    parts = zip(x.split(width, -1), weight.split(width, 1), strict=True)
    return torch.stack([F.linear(a.to(compute), b.to(compute)) for a, b in parts])


def add_split_k_ref(
    partials: torch.Tensor,
    stream: torch.Tensor,
    bias: torch.Tensor | None,
    norm: str,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
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
    return F.layer_norm(total, total.shape[-1:], None, None, eps).to(stream.dtype)
