"""The fastswin operators that the forward pass calls, in one place.

A stand-in with the same names can be given to ``Forward``, to note calls or to time them.
"""

from __future__ import annotations

import torch

from fastswin.ops import (
    gather_neighbours,
    layer_norm,
    layer_norm_per_token,
    linear,
    mlp,
    norm_pool,
    patch_embed,
    quantize,
    quantize_per_token,
    quantized_linear,
)
from fastswin.ops.window_attention.config import WindowAttentionConfig
from fastswin.ops.window_attention.reference import window_attention_ref
from fastswin.ops.window_attention.register import window_attention_fwd

__all__ = [
    "gather_neighbours",
    "layer_norm",
    "layer_norm_per_token",
    "linear",
    "mlp",
    "norm_pool",
    "packed_window_attention",
    "patch_embed",
    "quantize",
    "quantize_per_token",
    "quantized_linear",
    "quantized_window_attention_ref",
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
    *,
    qkv_scale: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Window attention ``[B, H, W, 3C] -> [B, H, W, C]`` on packed bias tables.

    Args:
        qkv, scale, num_heads, window_size, shift_size: as ``ops.window_attention`` has them.
        bias, head_scale: packed (ops/window_attention/packing.py).
        pad_qkv: ``[3C]``, the qkv of a padded token, in qkv's dtype.
        tf32: whether fp32 products run on tensor cores.
        config: tiles; None takes the heuristic.
        qkv_scale: fp32 ``[3]``, steps of 8-bit q, k and v; None where they are wide.
        output_scale: fp32 ``[1]``, step of an 8-bit output; None where it is wide.
        out_dtype: of the output; None takes qkv's.
    """
    arguments = (
        qkv, bias, head_scale, pad_qkv, scale, num_heads, window_size, shift_size, tf32,
    )  # fmt: skip
    narrow = qkv_scale is not None or output_scale is not None
    if config is None and not narrow:
        return window_attention_fwd(*arguments)
    from fastswin.ops.window_attention import forward

    if narrow:
        return forward.window_attention_fwd(
            *arguments, config=config, qkv_scale=qkv_scale, output_scale=output_scale,
            out_dtype=out_dtype,
        )  # fmt: skip
    return forward.window_attention_fwd(*arguments, config=config)


def quantized_window_attention_ref(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    scale: float,
    logit_scale: torch.Tensor | None,
    pad_qkv: torch.Tensor | None,
    *,
    qkv_scale: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``window_attention_ref`` on 8-bit q, k and v, or with an 8-bit output, or both.

    Args:
        qkv: ``[B, H, W, 3C]``, wide, or 8-bit with ``qkv_scale``.
        bias, num_heads, window_size, shift_size, scale, logit_scale: as the reference has them.
        pad_qkv: ``[3C]`` of a padded token, in qkv's dtype.
        qkv_scale: fp32 ``[3]``, steps of q, k and v; None where they are wide.
        output_scale: fp32 ``[1]``, step of the output; None where it is wide.
        out_dtype: of the output.
    """
    if qkv_scale is not None:
        steps = qkv_scale.repeat_interleave(qkv.shape[-1] // 3)
        qkv = qkv.float() * steps
        pad_qkv = None if pad_qkv is None else pad_qkv.float() * steps
    out = window_attention_ref(
        qkv, bias, num_heads, window_size, shift_size, scale, logit_scale, pad_qkv
    )
    if output_scale is None:
        return out.to(out_dtype)
    return quantize(out, output_scale, out_dtype, impl="reference")
