"""Public LayerNorm: validation and dispatch; with a gradient, to residual_norm's forms."""

from __future__ import annotations

import torch

from fastswin._triton.available import Impl, choose_impl, why_no_gradient, why_not_triton
from fastswin.ops.residual_norm import add_layer_norm, layer_norm_add

#: One program holds a whole row.
MAX_CHANNELS = 8192


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    offset: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """``residual + (layer_norm(x + offset) * weight + bias)`` over the last axis, in fp32.

    Args:
        x: ``[..., C]``, contiguous rows.
        weight: ``[C]`` or None (ones).
        bias: ``[C]`` or None (zeros).
        eps: added to the variance.
        offset: ``[C]``, added to every row before the norm; None adds nothing.
        residual: ``[..., C]`` like ``x``, added after the norm.
        out: where the result goes; may be ``x`` or ``residual``.
        impl: "auto", "triton" or "reference".

    Returns:
        ``[..., C]`` in x's dtype.

    Raises:
        ValueError: a shape does not fit; the message names the argument.
    """
    C = x.shape[-1]
    for name, vector in (("weight", weight), ("bias", bias), ("offset", offset)):
        if vector is not None and tuple(vector.shape) != (C,):
            raise ValueError(f"{name} must be [{C}], got {tuple(vector.shape)}")
    for name, like in (("residual", residual), ("out", out)):
        if like is not None and like.shape != x.shape:
            raise ValueError(f"{name} must be {tuple(x.shape)} like x, got {tuple(like.shape)}")
    gradient = why_no_gradient(x, weight, bias, offset, residual) is not None
    if gradient and offset is None and out is None and x.ndim > 1:  # these forms have a backward
        if residual is None:
            return add_layer_norm(x, weight, bias, eps=eps, impl=impl)[1]
        return layer_norm_add(residual, x, weight, bias, eps=eps, stream_dtype=x.dtype, impl=impl)
    chosen = choose_impl(
        impl,
        "layer_norm",
        [
            why_not_triton(x.device, x.dtype),
            why_no_gradient(x, weight, bias, offset, residual),
            f"{C} channels exceed {MAX_CHANNELS}" if C > MAX_CHANNELS else None,
        ],
    )
    if chosen == "reference":
        return _layer_norm_ref(x, weight, bias, eps, offset, residual, out)
    from fastswin.ops.layer_norm.forward import layer_norm_fwd

    return layer_norm_fwd(x, weight, bias, eps, offset, residual, out)


def _layer_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    compute = torch.promote_types(x.dtype, torch.float32)
    y = x.to(compute)
    if offset is not None:
        y = y + offset.to(compute)
    weight = None if weight is None else weight.to(compute)
    bias = None if bias is None else bias.to(compute)
    y = torch.nn.functional.layer_norm(y, (x.shape[-1],), weight, bias, eps)
    if residual is not None:
        y = y + residual.to(compute)
    y = y.to(x.dtype)
    return y if out is None else out.copy_(y)
