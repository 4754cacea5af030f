"""The definition as plain PyTorch, for any device and float dtype.

    y = scale * row_scale * (x @ weight.T) + bias + residual        fp32 (fp64 for fp64)
    y = gelu_tanh(y)                                                where asked for
    y = clamp(y / output_scale, -448, 448)                          where stored in e4m3

rounded once, at the end. e4m3 has no infinity: the library's conversion saturates, PyTorch's gives
NaN, hence the clamp; NaN stays NaN in both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

E4M3_MAX = 448.0


def library_linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    output_inverse: torch.Tensor | None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See :func:`~fastswin.ops.library_linear.library_linear`."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = F.linear(x.to(compute), weight.to(compute))
    if scale is not None:  # one factor, or one a channel, in whatever shape it comes
        y = y * scale.to(compute).flatten()
    if row_scale is not None:
        y = y * row_scale.to(compute).view(*y.shape[:-1], 1)
    if bias is not None:
        y = y + bias.to(compute)
    if residual is not None:
        y = y + residual.to(compute)
    if activation == "gelu":
        y = F.gelu(y, approximate="tanh")
    if output_scale is not None:
        y = y / output_scale.to(compute).flatten()
    if output_inverse is not None:
        y = y * output_inverse.to(compute).flatten()
    if out_dtype == torch.float8_e4m3fn:
        y = y.clamp(-E4M3_MAX, E4M3_MAX)
    y = y.to(out_dtype)
    return y if out is None else out.copy_(y)
