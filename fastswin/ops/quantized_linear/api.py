"""Public quantised linear layer: validation and dispatch."""

from __future__ import annotations

from typing import Literal

import torch

from fastswin._triton.available import Impl, choose_impl, why_no_gradient, why_not_triton
from fastswin.ops.quantize.checks import check_format, check_steps, why_not_format
from fastswin.ops.quantize.reference import LARGEST
from fastswin.ops.quantized_linear.config import (
    QuantizedGemmConfig,
    config_blocker,
    quantized_linear_blocker,
)
from fastswin.ops.quantized_linear.ordering import restore_rows, why_not_ordered
from fastswin.ops.quantized_linear.reference import quantized_linear_ref

Activation = Literal["gelu"]

WIDE = (torch.float16, torch.bfloat16, torch.float32)


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    row_scale: torch.Tensor | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    ordered: bool = False,
    impl: Impl = "auto",
    config: QuantizedGemmConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """``residual + activation((x @ weight.T) * scale + bias)`` of 8-bit operands in one kernel.

    Args:
        x: ``[..., K]`` int8 or float8_e4m3fn.
        weight: ``[N, K]`` in x's dtype, one step an output channel.
        scale: fp32 ``[N]``: input step times weight step; the weight's alone with ``row_scale``.
        bias: fp32 ``[N]`` or None.
        row_scale: fp32 ``[...]`` or ``[..., 1]``, the input's step of every token; None where
            ``scale`` holds it.
        activation: None or "gelu" (erf, to half a half-precision rounding).
        residual: ``[..., N]`` in ``out_dtype`` or None; excludes ``output_scale``.
        output_scale: fp32 ``[1]``, or ``[3]`` for the thirds of N (q, k and v): the result is
            stored in x's format with these steps. None stores it wide.
        out_dtype: of a wide result, float16, bfloat16 or float32; None takes residual's, out's, or
            float16.
        out: ``[..., N]`` where the result goes, contiguous; may be ``residual``.
        ordered: whether the rows of ``weight``, ``scale`` and ``bias`` are in the order in which
            the kernel stores 8-bit results fastest (``order_rows`` in ordering.py); the result's
            channels never are. Needs ``output_scale`` and multiples of 16 channels with each step.
        impl: "auto", "triton" or "reference".
        config: tiles of the kernel; None takes the heuristic.
        pdl: programmatic dependent launch (_triton/pdl.py), where no kernel in flight writes
            ``weight``, ``scale``, ``bias`` or ``output_scale``.

    Returns:
        ``[..., N]`` in x's dtype with ``output_scale``, else in ``out_dtype``. Int8 products are
        exact integers; fp8 sums are those of the tensor cores (fast accumulation on Hopper).

    Raises:
        ValueError: an argument does not fit; the message names it and the legal values.
        RuntimeError: ``impl="triton"`` cannot run here; the message says why.
    """
    check_format(x.dtype, "x")
    if weight.dtype != x.dtype:
        raise ValueError(f"weight must be {x.dtype} like x, got {weight.dtype}")
    N, K = weight.shape
    if x.shape[-1] != K:
        raise ValueError(f"x must end in weight's {K} input channels, got {tuple(x.shape)}")
    shape = (*x.shape[:-1], N)
    for name, vector in (("scale", scale), ("bias", bias)):
        if vector is None:
            continue
        if tuple(vector.shape) != (N,) or vector.dtype != torch.float32:
            raise ValueError(
                f"{name} must be float32 [{N}], got {vector.dtype} {tuple(vector.shape)}"
            )
    if row_scale is not None and (
        tuple(row_scale.shape) not in (shape[:-1], (*shape[:-1], 1))
        or row_scale.dtype != torch.float32
    ):
        raise ValueError(
            f"row_scale must be float32 {shape[:-1]}, got {row_scale.dtype} "
            f"{tuple(row_scale.shape)}"
        )
    if activation not in (None, "gelu"):
        raise ValueError(f"activation must be None or 'gelu', got {activation!r}")
    stored = _stored(x, output_scale, out_dtype, residual, out, N)
    if ordered:
        if output_scale is None:
            raise ValueError("ordered must be False without output_scale")
        if reason := why_not_ordered(N, output_scale.numel()):
            raise ValueError(f"ordered must be False: {reason}")
    for name, like in (("residual", residual), ("out", out)):
        if like is not None and (tuple(like.shape) != shape or like.dtype != stored):
            raise ValueError(
                f"{name} must be {stored} {shape}, got {like.dtype} {tuple(like.shape)}"
            )
    if out is not None and not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}")
    if config is not None and not isinstance(config, QuantizedGemmConfig):
        raise ValueError(f"config must be a QuantizedGemmConfig, got {type(config).__name__}")
    if config is not None and (blocker := config_blocker(config)):
        raise ValueError(f"config: {blocker}")
    wide = torch.float32 if stored in LARGEST else stored
    chosen = choose_impl(
        impl,
        "quantized_linear",
        [
            why_not_triton(x.device, wide),
            why_not_format(x.device, x.dtype),
            why_no_gradient(scale, bias, row_scale, residual),
            quantized_linear_blocker(N, K),
        ],
    )
    if chosen == "reference":
        if ordered:
            weight, scale = restore_rows(weight), restore_rows(scale)
            bias = None if bias is None else restore_rows(bias)
        y = quantized_linear_ref(
            x, weight, scale, bias, row_scale, activation, residual, output_scale, stored
        )
        return y if out is None else out.copy_(y)
    from fastswin.ops.quantized_linear.forward import quantized_linear_fwd

    return quantized_linear_fwd(
        x, weight, scale, bias, row_scale, activation, residual, output_scale, stored, out, config,
        pdl, ordered,
    )  # fmt: skip


def _stored(
    x: torch.Tensor,
    output_scale: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    N: int,
) -> torch.dtype:
    """Storage of the result."""
    if output_scale is not None:
        check_steps(output_scale, "output_scale", x, N, parts=(1, 3))
        if residual is not None:
            raise ValueError("residual and output_scale exclude each other")
        if out_dtype not in (None, x.dtype):
            raise ValueError(
                f"out_dtype must be None or {x.dtype} (x's) with output_scale, got {out_dtype}"
            )
        return x.dtype
    if out_dtype is None:
        like = out if residual is None else residual
        out_dtype = torch.float16 if like is None else like.dtype
    if out_dtype not in WIDE:
        raise ValueError(
            f"out_dtype must be float16, bfloat16 or float32 without output_scale, got {out_dtype}"
        )
    return out_dtype
