"""Public LayerNorms: validation and dispatch; with a gradient, to residual_norm's forms."""

from __future__ import annotations

import torch

from fastswin._triton.available import Impl, choose_impl, why_no_gradient, why_not_triton
from fastswin.ops.quantize.checks import (
    check_format,
    check_steps,
    resolve_output,
    why_not_format,
)
from fastswin.ops.quantize.reference import quantize_per_token_ref, quantize_ref
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
    output_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    impl: Impl = "auto",
    pdl: bool = False,
    tf32: bool = False,
) -> torch.Tensor:
    """``residual + (layer_norm(x + offset) * weight + bias)`` over the last axis, in fp32.

    Args:
        x: ``[..., C]``, contiguous rows.
        weight: ``[C]`` or None (ones).
        bias: ``[C]`` or None (zeros).
        eps: added to the variance.
        offset: ``[C]``, added to every row before the norm; None adds nothing.
        residual: ``[..., C]`` like ``x``, added after the norm.
        output_scale: fp32 ``[1]``: the result is stored in 8 bits with this step
            (:func:`fastswin.ops.quantize`); excludes ``residual``. None stores x's dtype.
        out_dtype: with ``output_scale``, ``torch.int8`` (None) or ``torch.float8_e4m3fn``.
        out: where the result goes; may be ``x`` or ``residual``.
        impl: "auto", "triton" or "reference".
        pdl: programmatic dependent launch (_triton/pdl.py), where no kernel in flight writes
            ``weight``, ``bias``, ``offset`` or ``output_scale``.
        tf32: round an fp32 result to TF32 numbers, for a product that would cut it off; excludes
            ``output_scale``. The kernel only: the reference's reader rounds itself.

    Returns:
        ``[..., C]`` in x's dtype, or in 8 bits.

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
    if tf32 and (output_scale is not None or x.dtype != torch.float32):
        raise ValueError(f"tf32 needs an fp32 result without output_scale, x is {x.dtype}")
    stored = resolve_output(output_scale, out_dtype, x.dtype)
    if output_scale is not None:
        check_steps(output_scale, "output_scale", x, C, parts=(1,))
        if residual is not None:
            raise ValueError("residual and output_scale exclude each other")
    elif stored != x.dtype:
        raise ValueError(f"out_dtype must be None or {x.dtype} without output_scale, got {stored}")
    if out is not None and out.dtype != stored:
        raise ValueError(f"out must be {stored}, got {out.dtype}")
    gradient = why_no_gradient(x, weight, bias, offset, residual) is not None
    plain = offset is None and out is None and output_scale is None
    if gradient and plain and x.ndim > 1:  # these forms have a backward
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
            None if output_scale is None else why_not_format(x.device, stored),
            None if out is None or out.is_contiguous() else "out is not contiguous",
        ],
    )
    if chosen == "reference":
        if output_scale is not None:
            y = _layer_norm_ref(x, weight, bias, eps, offset, None, None, torch.float32)
            y = quantize_ref(y, output_scale, stored)
            return y if out is None else out.copy_(y)
        return _layer_norm_ref(x, weight, bias, eps, offset, residual, out, x.dtype)
    from fastswin.ops.layer_norm.forward import layer_norm_fwd

    if output_scale is not None and out is None:
        out = torch.empty(x.shape, dtype=stored, device=x.device)
    return layer_norm_fwd(
        x, weight, bias, eps, offset, residual, out, output_scale, pdl=pdl, tf32=tf32
    )


def layer_norm_per_token(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    offset: torch.Tensor | None = None,
    dtype: torch.dtype = torch.int8,
    impl: Impl = "auto",
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``layer_norm(x + offset) * weight + bias`` in 8 bits, every row with a step of its own.

    Args:
        x, weight, bias, eps, offset, impl, pdl: as in :func:`layer_norm`.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.

    Returns:
        ``[..., C]`` in ``dtype``, and the steps ``[...]`` fp32: the row's largest magnitude over
        the format's (127 or 448), 1 for an all-zero row, NaN for a row with NaN.

    Raises:
        ValueError: an argument does not fit; the message names it.
        RuntimeError: ``impl="triton"`` cannot run here.
    """
    C = x.shape[-1]
    check_format(dtype, "dtype")
    for name, vector in (("weight", weight), ("bias", bias), ("offset", offset)):
        if vector is not None and tuple(vector.shape) != (C,):
            raise ValueError(f"{name} must be [{C}], got {tuple(vector.shape)}")
    chosen = choose_impl(
        impl,
        "layer_norm_per_token",
        [
            why_not_triton(x.device, x.dtype),
            why_no_gradient(x, weight, bias, offset),
            f"{C} channels exceed {MAX_CHANNELS}" if C > MAX_CHANNELS else None,
            why_not_format(x.device, dtype),
        ],
    )
    if chosen == "reference":
        y = _layer_norm_ref(x, weight, bias, eps, offset, None, None, torch.float32)
        return quantize_per_token_ref(y, dtype)
    from fastswin.ops.layer_norm.forward import layer_norm_fwd

    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    row_scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    layer_norm_fwd(x, weight, bias, eps, offset, None, out, row_scale=row_scale, pdl=pdl)
    return out, row_scale


def _layer_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    dtype: torch.dtype,
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
    y = y.to(dtype)
    return y if out is None else out.copy_(y)
