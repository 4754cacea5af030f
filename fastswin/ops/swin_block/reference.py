"""A block as its two halves' references: what the kernel is tested against."""

from __future__ import annotations

import torch

from fastswin.ops.attention_half.reference import attention_half_ref
from fastswin.ops.mlp.reference import mlp_ref

Pair = tuple[int, int]
Vector = torch.Tensor | None


def swin_block_ref(
    x: torch.Tensor,
    qkv: tuple[torch.Tensor, Vector],
    proj: tuple[torch.Tensor, Vector],
    fc1: tuple[torch.Tensor, Vector],
    fc2: tuple[torch.Tensor, Vector],
    bias: Vector,
    pad_qkv: Vector,
    norm1: tuple[Vector, Vector],
    norm2: tuple[Vector, Vector],
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    scale: float,
    logit_scale: Vector,
    eps: float,
) -> torch.Tensor:
    """See the public function; rounds to x's dtype after each layer, as separate layers do."""
    half = attention_half_ref(
        x, *qkv, bias, pad_qkv, num_heads, window_size, shift_size, scale, logit_scale, eps,
        norm1[0] is None, None, *proj, *norm1,
    )  # fmt: skip
    biases = [torch.zeros_like(w[:, 0]) if b is None else b for w, b in (fc1, fc2)]
    return mlp_ref(half, fc1[0], biases[0], fc2[0], biases[1], *norm2, None, eps)
