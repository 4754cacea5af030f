"""A whole block as its two halves: what the kernel is tested against."""

from __future__ import annotations

import torch

from fastswin.ops.attention_half.reference import attention_half_ref
from fastswin.ops.mlp.api import mlp_ref

Pair = tuple[int, int]
Vector = torch.Tensor | None


def swin_block_ref(
    x: torch.Tensor,
    attention: tuple[torch.Tensor, Vector, Vector, Vector, torch.Tensor, Vector],
    feed_forward: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    norms: tuple[Vector, Vector, Vector, Vector],
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    scale: float,
    logit_scale: Vector,
    eps: float,
) -> torch.Tensor:
    """See the public function; rounds to x's dtype after each layer, as separate layers do.

    Args:
        attention: qkv's weight and bias, dense position bias, a padded token's qkv, proj's weight
            and bias.
        feed_forward: weights and biases of fc1 and fc2.
        norms: V2's first and second weight and bias; all None in V1.
    """
    qkv_weight, qkv_bias, bias, pad_qkv, proj_weight, proj_bias = attention
    norm1_weight, norm1_bias, norm2_weight, norm2_bias = norms
    mid = attention_half_ref(
        x, qkv_weight, qkv_bias, bias, pad_qkv, num_heads, window_size, shift_size, scale,
        logit_scale, eps, norm1_weight is None, None, proj_weight, proj_bias, norm1_weight,
        norm1_bias,
    )  # fmt: skip
    return mlp_ref(mid, *feed_forward, norm2_weight, norm2_bias, None, eps, None)
