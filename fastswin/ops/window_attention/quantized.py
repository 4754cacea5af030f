"""Window attention on 8-bit q, k and v, or with an 8-bit output, or both.

    scores = (q8 @ k8.T) * (scale * q step * k step)     V1, int8: exact integer products
    scores = cos(q8, k8) * temperature                   V2: the norms cancel the steps
    out    = (softmax(scores + bias + mask) @ v8) * v step, wide or in steps of the output

Softmax and sums are fp32 as in the wide operator, whose kernels these are; the steps of q, k and v
are those of the qkv layer's output, the output's step is that of the projection's input.
"""

from __future__ import annotations

import torch

from fastswin._triton.available import Impl, choose_impl, why_no_gradient, why_not_triton
from fastswin.ops.quantize.checks import check_format, check_steps, resolve_output, why_not_format
from fastswin.ops.quantize.reference import LARGEST, quantize_ref
from fastswin.ops.window_attention.packing import pack_bias, pack_head_scale
from fastswin.ops.window_attention.reference import window_attention_ref

Pair = tuple[int, int]

#: head_dim range of the kernels.
KERNEL_HEAD_DIMS = (1, 128)


def quantized_window_attention(
    qkv: torch.Tensor,
    *,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair = (0, 0),
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    logit_scale: torch.Tensor | None = None,
    qkv_bias: torch.Tensor | None = None,
    qkv_scale: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Shifted-window attention from and to 8-bit maps in image order.

    Args:
        qkv: ``[B, H, W, 3C]``: int8 or float8_e4m3fn with ``qkv_scale``, else fp16, bf16 or fp32.
        num_heads, window_size, shift_size, scale, logit_scale: as in
            :func:`fastswin.ops.window_attention`.
        bias: dense relative position bias ``[nH, N, N]`` or None.
        qkv_bias: ``[3C]``, qkv of a padded token: in qkv's dtype (as stored), or wide.
        qkv_scale: fp32 ``[3]``, steps of q, k and v.
        output_scale: fp32 ``[1]``, step of the output. None writes it wide.
        out_dtype: of the output: int8 (None) or float8_e4m3fn with ``output_scale``, else float16
            (None for an 8-bit qkv), bfloat16 or float32.
        impl: "auto", "triton" or "reference".

    Returns:
        ``[B, H, W, C]``, contiguous.

    Raises:
        ValueError: an argument does not fit; the message names it and the legal values.
        RuntimeError: ``impl="triton"`` cannot run here.
    """
    channels = qkv.shape[-1]
    if qkv.ndim != 4 or channels % (3 * num_heads):
        raise ValueError(
            f"qkv must be [B, H, W, 3C] with C a multiple of num_heads={num_heads}, got "
            f"{tuple(qkv.shape)}"
        )
    if (qkv.dtype in LARGEST) != (qkv_scale is not None):
        raise ValueError(f"qkv_scale must be given for an 8-bit qkv and only there: {qkv.dtype}")
    if qkv_scale is not None:
        check_format(qkv.dtype, "qkv")
        check_steps(qkv_scale, "qkv_scale", qkv, channels, parts=(3,))
    if output_scale is not None:
        check_steps(output_scale, "output_scale", qkv, channels // 3, parts=(1,))
    wide = torch.float16 if qkv_scale is not None else qkv.dtype
    stored = resolve_output(output_scale, out_dtype, wide)
    head_dim = channels // (3 * num_heads)
    scale = head_dim**-0.5 if scale is None else float(scale)
    low, high = KERNEL_HEAD_DIMS
    formats = [d for d in (qkv.dtype, stored) if d in LARGEST]
    chosen = choose_impl(
        impl,
        "quantized_window_attention",
        [
            why_not_triton(qkv.device, wide),
            *(why_not_format(qkv.device, d) for d in formats),
            why_no_gradient(bias, logit_scale, qkv_bias),
            None if low <= head_dim <= high else f"head_dim {head_dim} is not in [{low}, {high}]",
        ],
    )
    if chosen == "reference":
        return quantized_window_attention_ref(
            qkv, bias, num_heads, window_size, shift_size, scale, logit_scale, qkv_bias,
            qkv_scale, output_scale, stored,
        )  # fmt: skip
    from fastswin.ops.window_attention.register import quantized_window_attention_fwd

    return quantized_window_attention_fwd(
        qkv.contiguous(), pack_bias(bias, num_heads, window_size, shift_size, qkv.device),
        pack_head_scale(logit_scale), qkv_bias, qkv_scale, output_scale, scale, num_heads,
        window_size, shift_size, False, stored,
    )  # fmt: skip


def quantized_window_attention_ref(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    scale: float,
    logit_scale: torch.Tensor | None,
    qkv_bias: torch.Tensor | None,
    qkv_scale: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """As plain PyTorch in fp32; see the public function."""
    wide = qkv.float()
    pad = None if qkv_bias is None else qkv_bias.float()
    if qkv_scale is not None:
        steps = qkv_scale.repeat_interleave(qkv.shape[-1] // 3)
        wide = wide * steps
        if qkv_bias is not None and pad is not None:
            if qkv_bias.dtype != qkv.dtype:
                pad = quantize_ref(pad, qkv_scale, qkv.dtype).float()
            pad = pad * steps
    out = window_attention_ref(
        wide, bias, num_heads, window_size, shift_size, scale, logit_scale, pad
    )
    if output_scale is None:
        return out.to(out_dtype)
    return quantize_ref(out, output_scale, out_dtype)
