"""The attention half as a composition of PyTorch operations: what the kernels are tested against.

V1 normalises first, V2 last (``o`` an offset, LayerNorm without affine in front, with it behind):

    y = attn(norm(x + o))                                      without proj
    y = (x + o) + attn(norm(x + o)) @ P.T + b                  V1
    y = x + norm(attn(x) @ P.T + b)                            V2

Each step rounds to x's dtype, as separate layers do; fp64 stays fp64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastswin.ops.window_attention.reference import window_attention_ref

Pair = tuple[int, int]


def attention_half_ref(
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    bias: torch.Tensor | None,
    pad_qkv: torch.Tensor | None,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    scale: float,
    logit_scale: torch.Tensor | None,
    eps: float,
    norm_first: bool,
    offset: torch.Tensor | None,
    proj_weight: torch.Tensor | None,
    proj_bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
) -> torch.Tensor:
    """See the public function."""
    dtype, C = x.dtype, x.shape[-1]
    compute = torch.promote_types(dtype, torch.float32)
    residual = x.to(compute)
    if offset is not None:
        residual = residual + offset.to(compute)
    h = F.layer_norm(residual, (C,), eps=eps) if norm_first else residual
    qkv = F.linear(h.to(dtype), qkv_weight, None if qkv_bias is None else qkv_bias.to(dtype))
    attended = window_attention_ref(
        qkv, bias, num_heads, window_size, shift_size, scale, logit_scale, pad_qkv
    )
    if proj_weight is None:
        return attended
    branch = F.linear(attended, proj_weight, None if proj_bias is None else proj_bias.to(dtype))
    branch = branch.to(compute)
    if norm_weight is not None and norm_bias is not None:
        branch = F.layer_norm(branch, (C,), norm_weight.to(compute), norm_bias.to(compute), eps)
    return (residual + branch).to(dtype)
