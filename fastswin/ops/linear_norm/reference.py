"""The operator as plain PyTorch: the product, the stored stream, and the LayerNorm of that."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastswin.ops.quantize.reference import quantize_per_token_ref, quantize_ref
from fastswin.ops.quantized_linear.reference import quantized_linear_ref


def linear_add_layer_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    scale: torch.Tensor | None,
    eps: float,
    output_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    per_token: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Stream ``[..., C]``, its normalised rows and their steps; see the public function."""
    dtype = residual.dtype
    if scale is None:
        y = F.linear(x, weight, None if bias is None else bias.to(x.dtype))
        stream = (residual + y).to(dtype)
    else:
        stream = quantized_linear_ref(
            x, weight, scale, bias, None, None, residual, None, torch.float32
        ).to(dtype)
    wide = stream.to(torch.promote_types(dtype, torch.float32))
    rows = F.layer_norm(wide, (wide.shape[-1],), eps=eps)
    if per_token:
        return stream, *quantize_per_token_ref(rows, out_dtype)
    if output_scale is not None:
        return stream, quantize_ref(rows, output_scale, out_dtype), None
    return stream, rows.to(dtype), None
