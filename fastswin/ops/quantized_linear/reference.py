"""The quantised linear layer as plain PyTorch; int8 products are exact integers.

    y = (x @ weight.T) * scale (* row_scale) + bias, then GELU, then residual or rounding to 8 bits

fp32 holds a sum of up to 1024 products of two int8 numbers exactly (1024 * 127 * 127 < 2**24);
longer sums are added up in fp64. fp8 operands are multiplied and summed in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastswin.ops.quantize.reference import quantize_ref

EXACT_TERMS = 1024


def product_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [M, K] @ weight [N, K].T`` in fp32; int8: the exact sum, rounded once above 2**24."""
    if x.dtype != torch.int8:
        return x.float() @ weight.float().t()
    if x.is_cuda:  # fp64: no setting of the process can turn it into TF32
        return (x.double() @ weight.double().t()).float()
    if x.shape[1] <= EXACT_TERMS:
        return x.float() @ weight.float().t()
    total = x.new_zeros(len(x), len(weight), dtype=torch.float64)
    for a, b in zip(x.split(EXACT_TERMS, 1), weight.split(EXACT_TERMS, 1), strict=True):
        total += a.float() @ b.float().t()
    return total.float()


def quantized_linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``[..., K]`` to ``[..., N]`` in ``out_dtype``; see the public function."""
    N, K = weight.shape
    y = product_ref(x.reshape(-1, K), weight) * scale
    if row_scale is not None:
        y = y * row_scale.reshape(-1, 1)
    if bias is not None:
        y = y + bias
    if activation == "gelu":
        y = F.gelu(y)
    y = y.view(*x.shape[:-1], N)
    if output_scale is not None:
        return quantize_ref(y, output_scale, out_dtype)
    if residual is not None:
        y = residual.float() + y
    return y.to(out_dtype)
