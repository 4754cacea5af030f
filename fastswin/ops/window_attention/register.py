"""Schema, fake kernel and dispatch of the window-attention operators; imports no Triton.

The registered operators take packed arguments (packing.py), so that an engine that packs once at
load crosses the dispatcher once per block. Raw ``define`` / ``impl``: about 2.6 us a call, half of
``torch.library.custom_op``.
"""

from __future__ import annotations

import torch

Pair = tuple[int, int]

torch.library.define(
    "fastswin::window_attention_fwd",
    "(Tensor qkv, Tensor bias, Tensor? head_scale, Tensor? qkv_bias, float scale, int num_heads, "
    "int[2] window_size, int[2] shift_size, bool tf32) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "fastswin::window_attention_partitioned_fwd",
    "(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask, Tensor? head_scale, float scale, "
    "bool tf32) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "fastswin::quantized_window_attention_fwd",
    "(Tensor qkv, Tensor bias, Tensor? head_scale, Tensor? qkv_bias, Tensor? qkv_scale, "
    "Tensor? output_scale, float scale, int num_heads, int[2] window_size, int[2] shift_size, "
    "bool tf32, ScalarType out_dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("fastswin::window_attention_fwd", "default")
def _window_attention_fwd(
    qkv: torch.Tensor,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    qkv_bias: torch.Tensor | None,
    scale: float,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    tf32: bool,
) -> torch.Tensor:
    from fastswin.ops.window_attention import forward

    return forward.window_attention_fwd(
        qkv,
        bias,
        head_scale,
        qkv_bias,
        scale,
        num_heads,
        (window_size[0], window_size[1]),  # the dispatcher hands over lists
        (shift_size[0], shift_size[1]),
        tf32,
    )


@torch.library.register_fake("fastswin::window_attention_fwd")
def _window_attention_fwd_fake(
    qkv: torch.Tensor,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    qkv_bias: torch.Tensor | None,
    scale: float,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    tf32: bool,
) -> torch.Tensor:
    B, H, W, channels = qkv.shape
    return qkv.new_empty(B, H, W, channels // 3)


@torch.library.impl("fastswin::window_attention_partitioned_fwd", "default")
def _window_attention_partitioned_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    head_scale: torch.Tensor | None,
    scale: float,
    tf32: bool,
) -> torch.Tensor:
    from fastswin.ops.window_attention import forward

    return forward.window_attention_partitioned_fwd(q, k, v, bias, mask, head_scale, scale, tf32)


@torch.library.register_fake("fastswin::window_attention_partitioned_fwd")
def _window_attention_partitioned_fwd_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    head_scale: torch.Tensor | None,
    scale: float,
    tf32: bool,
) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.impl("fastswin::quantized_window_attention_fwd", "default")
def _quantized_window_attention_fwd(
    qkv: torch.Tensor,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    qkv_bias: torch.Tensor | None,
    qkv_scale: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    scale: float,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    tf32: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    from fastswin.ops.window_attention import forward

    return forward.window_attention_fwd(
        qkv, bias, head_scale, qkv_bias, scale, num_heads, (window_size[0], window_size[1]),
        (shift_size[0], shift_size[1]), tf32, qkv_scale=qkv_scale, output_scale=output_scale,
        out_dtype=out_dtype,
    )  # fmt: skip


@torch.library.register_fake("fastswin::quantized_window_attention_fwd")
def _quantized_window_attention_fwd_fake(
    qkv: torch.Tensor,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    qkv_bias: torch.Tensor | None,
    qkv_scale: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    scale: float,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    tf32: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    B, H, W, channels = qkv.shape
    return qkv.new_empty(B, H, W, channels // 3, dtype=out_dtype)


window_attention_fwd = torch.ops.fastswin.window_attention_fwd
window_attention_partitioned_fwd = torch.ops.fastswin.window_attention_partitioned_fwd
quantized_window_attention_fwd = torch.ops.fastswin.quantized_window_attention_fwd
