"""Public quantisation to 8 bits: validation and dispatch."""

from __future__ import annotations

import torch

from fastswin._triton.available import Impl, choose_impl, why_no_gradient, why_not_triton
from fastswin.ops.quantize.checks import check_format, check_steps, why_not_format
from fastswin.ops.quantize.reference import quantize_per_token_ref, quantize_ref

#: One program holds a whole row where each token finds its own step.
MAX_CHANNELS = 8192


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
    impl: Impl = "auto",
    pdl: bool = False,
) -> torch.Tensor:
    """``x / scale``, saturated and rounded to 8 bits.

    Args:
        x: ``[..., C]`` fp32, fp16 or bf16, any strides.
        scale: fp32 ``[1]``, or ``[parts]``: steps of as many equal parts of the last axis. A step
            of 0 counts as 1.
        dtype: ``torch.int8`` (-127..127, half to even; NaN becomes 0) or ``torch.float8_e4m3fn``
            (NaN stays NaN).
        out: ``[..., C]`` in ``dtype``, where the result goes.
        impl: "auto", "triton" or "reference".
        pdl: programmatic dependent launch (_triton/pdl.py), where no kernel in flight writes
            ``scale``.

    Returns:
        ``[..., C]`` in ``dtype``, contiguous.

    Raises:
        ValueError: an argument does not fit; the message names it and the legal values.
        RuntimeError: ``impl="triton"`` cannot run here.
    """
    check_format(dtype, "dtype")
    check_steps(scale, "scale", x, x.shape[-1])
    if out is not None and (out.shape != x.shape or out.dtype != dtype):
        raise ValueError(
            f"out must be {dtype} {tuple(x.shape)}, got {out.dtype} {tuple(out.shape)}"
        )
    blockers = [
        why_not_triton(x.device, x.dtype), why_not_format(x.device, dtype), why_no_gradient(x),
    ]  # fmt: skip
    if choose_impl(impl, "quantize", blockers) == "reference":
        y = quantize_ref(x, scale, dtype)
        return y if out is None else out.copy_(y)
    from fastswin.ops.quantize.forward import quantize_fwd

    return quantize_fwd(x, scale, dtype, out, pdl)


def quantize_per_token(
    x: torch.Tensor, dtype: torch.dtype, *, impl: Impl = "auto", pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row in 8 bits with a step of its own, its largest magnitude over the format's.

    Args:
        x: ``[..., C]`` fp32, fp16 or bf16.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.
        impl: "auto", "triton" or "reference".
        pdl: programmatic dependent launch (_triton/pdl.py).

    Returns:
        ``[..., C]`` in ``dtype``, and the steps ``[...]`` fp32: 1 for an all-zero row, NaN for a
        row with NaN.

    Raises:
        ValueError: ``dtype`` is not an 8-bit format.
        RuntimeError: ``impl="triton"`` cannot run here.
    """
    check_format(dtype, "dtype")
    C = x.shape[-1]
    blockers = [
        why_not_triton(x.device, x.dtype), why_not_format(x.device, dtype), why_no_gradient(x),
        f"{C} channels exceed {MAX_CHANNELS}" if C > MAX_CHANNELS else None,
    ]  # fmt: skip
    if choose_impl(impl, "quantize_per_token", blockers) == "reference":
        return quantize_per_token_ref(x, dtype)
    from fastswin.ops.quantize.forward import quantize_per_token_fwd

    return quantize_per_token_fwd(x, dtype, pdl)
