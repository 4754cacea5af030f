"""The MLP half as PyTorch operations: what the kernels are tested against.

    V1   x' + fc2(gelu(fc1(norm(x'))))        x' = x + offset
    V2   x' + norm(fc2(gelu(fc1(x'))))

Each step rounds to x's dtype, as separate layers do; fp64 stays fp64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def mlp_ref(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    offset: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """See the public function."""
    dtype, C = x.dtype, x.shape[-1]
    compute = torch.promote_types(dtype, torch.float32)
    residual = x.to(compute)
    if offset is not None:
        residual = residual + offset.to(compute)
    h = residual
    if norm_weight is None:
        h = F.layer_norm(h, (C,), eps=eps)
    h = F.gelu(F.linear(h.to(dtype), fc1_weight, fc1_bias.to(dtype)))
    h = F.linear(h, fc2_weight, fc2_bias.to(dtype)).to(compute)
    if norm_weight is not None and norm_bias is not None:
        h = F.layer_norm(h, (C,), norm_weight.to(compute), norm_bias.to(compute), eps)
    return (residual + h).to(dtype)
