"""Public product with the LayerNorm of the stream behind it: validation and dispatch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastswin._triton.available import (
    Impl,
    choose_impl,
    why_no_gradient,
    why_not_half,
    why_not_triton,
)
from fastswin._triton.device import device_capability
from fastswin.ops.linear_norm.config import LinearNormConfig, linear_norm_blocker
from fastswin.ops.linear_norm.reference import linear_add_layer_norm_ref
from fastswin.ops.quantize.checks import check_format, check_steps, resolve_output, why_not_format
from fastswin.ops.quantize.reference import LARGEST


class NormedRows(NamedTuple):
    """The stream and what its next reader takes.

    Attributes:
        stream: ``[..., C]`` in residual's dtype.
        normed: ``[..., C]``, its LayerNorm without affine, in residual's dtype or in 8 bits.
        row_scale: fp32 ``[...]``, the steps of ``normed`` where every row has its own; else None.
    """

    stream: torch.Tensor
    normed: torch.Tensor
    row_scale: torch.Tensor | None = None


def linear_add_layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor,
    scale: torch.Tensor | None = None,
    eps: float = 1e-5,
    output_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    per_token: bool = False,
    out: torch.Tensor | None = None,
    impl: Impl = "auto",
    config: LinearNormConfig | None = None,
    pdl: bool = False,
) -> NormedRows:
    """``stream = residual + x @ weight.T (* scale) + bias`` and its LayerNorm in one kernel.

    Args:
        x: ``[..., K]`` in residual's dtype, or int8 or float8_e4m3fn with ``scale``.
        weight: ``[C, K]`` in x's dtype.
        bias: ``[C]`` or None.
        residual: ``[..., C]``, float16 or bfloat16 for the kernel.
        scale: fp32 ``[C]``, input step times weight step of 8-bit operands; None for wide ones.
        eps: added to the variance.
        output_scale: fp32 ``[1]``: the normalised rows are stored in 8 bits with this step.
        out_dtype: of the normalised rows with ``output_scale`` or ``per_token``, ``torch.int8``
            (None) or ``torch.float8_e4m3fn``.
        per_token: stores them in 8 bits with a step of each row's own; excludes ``output_scale``.
        out: contiguous ``[..., C]`` where the stream goes; may be ``residual``.
        impl: "auto", "triton" or "reference".
        config: tiles; None takes the heuristic.
        pdl: programmatic dependent launch (_triton/pdl.py), where no kernel in flight writes
            ``weight``, ``scale``, ``bias`` or ``output_scale``.

    Returns:
        The stream, its LayerNorm (statistics of the stream as stored, in fp32) and, with
        ``per_token``, the steps of its rows as :func:`fastswin.ops.layer_norm_per_token` has them.

    Raises:
        ValueError: an argument does not fit; the message names it and the legal values.
        RuntimeError: ``impl="triton"`` cannot run here; the message says why.
    """
    C, K = weight.shape
    _check_operands(x, weight, scale, residual, out)
    if bias is not None and tuple(bias.shape) != (C,):
        raise ValueError(f"bias must be [{C}], got {tuple(bias.shape)}")
    stored = _stored(x, C, residual.dtype, output_scale, out_dtype, per_token)
    if config is not None and not isinstance(config, LinearNormConfig):
        raise ValueError(f"config must be a LinearNormConfig, got {type(config).__name__}")
    chosen = choose_impl(
        impl,
        "linear_add_layer_norm",
        [
            why_not_triton(x.device, residual.dtype),
            why_not_half(residual.dtype),
            None if scale is None else why_not_format(x.device, x.dtype),
            why_not_format(x.device, stored) if stored in LARGEST else None,
            why_no_gradient(x if scale is None else None, bias, residual, scale),
            linear_norm_blocker(C, K, x.element_size(), device_capability(x.device), config),
        ],
    )
    if chosen == "reference":
        stream, normed, row_scale = linear_add_layer_norm_ref(
            x, weight, bias, residual, scale, eps, output_scale, stored, per_token
        )
        return NormedRows(stream if out is None else out.copy_(stream), normed, row_scale)
    from fastswin.ops.linear_norm.forward import linear_add_norm_fwd

    shape, device = residual.shape, x.device
    stream = torch.empty(shape, dtype=residual.dtype, device=device) if out is None else out
    normed = torch.empty(shape, dtype=stored, device=device)
    row_scale = None
    if per_token:
        row_scale = torch.empty(shape[:-1], dtype=torch.float32, device=device)
    linear_add_norm_fwd(
        x, weight, scale, bias, residual, eps, stream, normed, output_scale, row_scale, config, pdl
    )
    return NormedRows(stream, normed, row_scale)


def _check_operands(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    residual: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    C, K = weight.shape
    if scale is not None:
        check_format(x.dtype, "x with scale")
        if tuple(scale.shape) != (C,) or scale.dtype != torch.float32:
            raise ValueError(f"scale must be float32 [{C}], got {scale.dtype} {tuple(scale.shape)}")
    elif x.dtype != residual.dtype:
        raise ValueError(
            f"x must be {residual.dtype} like residual, or 8 bits with scale, got {x.dtype}"
        )
    if weight.dtype != x.dtype:
        raise ValueError(f"weight must be {x.dtype} like x, got {weight.dtype}")
    if x.shape[-1] != K:
        raise ValueError(f"x must end in weight's {K} input channels, got {tuple(x.shape)}")
    shape = (*x.shape[:-1], C)
    for name, like in (("residual", residual), ("out", out)):
        if like is not None and (tuple(like.shape) != shape or like.dtype != residual.dtype):
            raise ValueError(
                f"{name} must be {residual.dtype} {shape}, got {like.dtype} {tuple(like.shape)}"
            )
    if out is not None and not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}")


def _stored(
    x: torch.Tensor,
    C: int,
    wide: torch.dtype,
    output_scale: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    per_token: bool,
) -> torch.dtype:
    """Storage of the normalised rows."""
    if per_token:
        if output_scale is not None:
            raise ValueError("per_token and output_scale exclude each other")
        stored = torch.int8 if out_dtype is None else out_dtype
        check_format(stored, "out_dtype with per_token")
        return stored
    stored = resolve_output(output_scale, out_dtype, wide)
    if output_scale is not None:
        check_steps(output_scale, "output_scale", x, C, parts=(1,))
    elif stored != wide:
        raise ValueError(f"out_dtype must be None or {wide} without output_scale, got {stored}")
    return stored
