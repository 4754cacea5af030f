"""Residual and norm as plain PyTorch: the definition that the kernels are tested against.

    stream = x + branch_scale * (branch + branch_bias)              residual_add
    stream, normed = residual_add(...), LN(stream)                  add_layer_norm   (V1)
    stream = x + branch_scale * LN(branch + branch_bias)            layer_norm_add   (V2)

Computed in fp32 (fp64 for fp64) and rounded once where something is stored. The norm reads the
stream as it is stored, so that a half-precision stream and its norm belong together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def residual_add_ref(
    x: torch.Tensor,
    branch: torch.Tensor,
    branch_bias: torch.Tensor | None,
    branch_scale: torch.Tensor | None,
    stream_dtype: torch.dtype,
) -> torch.Tensor:
    """See the public function."""
    compute = torch.promote_types(stream_dtype, torch.float32)
    y = branch.to(compute)
    if branch_bias is not None:
        y = y + branch_bias.to(compute)
    return (x.to(compute) + _scaled(y, branch_scale)).to(stream_dtype)


def layer_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    norm_dtype: torch.dtype,
) -> torch.Tensor:
    """LayerNorm in fp32 (fp64 for fp64), rounded to ``norm_dtype``."""
    compute = torch.promote_types(x.dtype, torch.float32)
    weight = None if weight is None else weight.to(compute)
    bias = None if bias is None else bias.to(compute)
    return F.layer_norm(x.to(compute), (x.shape[-1],), weight, bias, eps).to(norm_dtype)


def layer_norm_add_ref(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    branch_bias: torch.Tensor | None,
    branch_scale: torch.Tensor | None,
    stream_dtype: torch.dtype,
) -> torch.Tensor:
    """See the public function."""
    compute = torch.promote_types(stream_dtype, torch.float32)
    y = branch.to(compute)
    if branch_bias is not None:
        y = y + branch_bias.to(compute)
    y = layer_norm_ref(y, weight, bias, eps, compute)
    return (x.to(compute) + _scaled(y, branch_scale)).to(stream_dtype)


def _scaled(y: torch.Tensor, branch_scale: torch.Tensor | None) -> torch.Tensor:
    if branch_scale is None:
        return y
    return y * branch_scale.to(y.dtype).view(-1, *[1] * (y.ndim - 1))
