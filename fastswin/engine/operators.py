"""The fastswin operators that the forward pass calls, in one place.

A stand-in with the same names can be given to ``Forward``, to note calls or to time them.
"""

from __future__ import annotations

import torch

from fastswin.ops import gather_neighbours, layer_norm, linear, mlp, norm_pool, patch_embed
from fastswin.ops.window_attention.config import WindowAttentionConfig
from fastswin.ops.window_attention.reference import window_attention_ref
from fastswin.ops.window_attention.register import window_attention_fwd

__all__ = [
    "gather_neighbours",
    "layer_norm",
    "linear",
    "mlp",
    "norm_pool",
    "packed_window_attention",
    "patch_embed",
    "window_attention_ref",
]

Pair = tuple[int, int]


def packed_window_attention(
    qkv: torch.Tensor,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    pad_qkv: torch.Tensor | None,
    scale: float,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    tf32: bool,
    config: WindowAttentionConfig | None = None,
) -> torch.Tensor:
    """Window attention ``[B, H, W, 3C] -> [B, H, W, C]`` on packed bias tables.

    Args:
        qkv, scale, num_heads, window_size, shift_size: as ``ops.window_attention`` has them.
        bias, head_scale: packed (ops/window_attention/packing.py).
        pad_qkv: ``[3C]``, the qkv of a padded token.
        tf32: whether fp32 products run on tensor cores.
        config: tiles; None takes the heuristic.
    """
    arguments = (
        qkv, bias, head_scale, pad_qkv, scale, num_heads, window_size, shift_size, tf32,
    )  # fmt: skip
    if config is None:
        return window_attention_fwd(*arguments)
    from fastswin.ops.window_attention import forward

    return forward.window_attention_fwd(*arguments, config=config)
