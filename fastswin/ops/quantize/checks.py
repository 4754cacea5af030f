"""Checks of 8-bit arguments that several operators share; imports no Triton."""

from __future__ import annotations

import torch

from fastswin._triton.available import capability, interpreting
from fastswin.ops.quantize.reference import LARGEST

#: Oldest compute capability with tensor-core products of a format in Triton.
MIN_CAPABILITY: dict[torch.dtype, tuple[int, int]] = {
    torch.int8: (8, 0),
    torch.float8_e4m3fn: (8, 9),
}


def check_format(dtype: torch.dtype, name: str) -> None:
    """Raise ValueError unless ``dtype`` is an 8-bit storage format."""
    if dtype not in LARGEST:
        raise ValueError(f"{name} must be torch.int8 or torch.float8_e4m3fn, got {dtype}")


def check_steps(
    scale: torch.Tensor, name: str, x: torch.Tensor, channels: int, parts: tuple[int, ...] = ()
) -> None:
    """Raise ValueError unless ``scale`` is fp32 ``[parts]`` beside ``x`` and parts fit channels."""
    n = scale.numel()
    if scale.dtype != torch.float32 or scale.ndim != 1 or n == 0 or (parts and n not in parts):
        legal = " or ".join(f"[{p}]" for p in parts) or "[parts]"
        raise ValueError(f"{name} must be float32 {legal}, got {scale.dtype} {tuple(scale.shape)}")
    if channels % n:
        raise ValueError(f"{name} has {n} parts, which do not divide {channels} channels")
    if scale.device != x.device:
        raise ValueError(f"{name} is on {scale.device} but the input is on {x.device}")


def resolve_output(
    output_scale: torch.Tensor | None, out_dtype: torch.dtype | None, wide: torch.dtype
) -> torch.dtype:
    """Storage of a result: ``out_dtype``, int8 (with steps) or ``wide`` (without) where None.

    Raises:
        ValueError: an 8-bit dtype without steps, or steps with a wide dtype.
    """
    if output_scale is None:
        if out_dtype in LARGEST:
            raise ValueError(f"out_dtype {out_dtype} needs output_scale")
        return wide if out_dtype is None else out_dtype
    if out_dtype is None:
        return torch.int8
    check_format(out_dtype, "out_dtype with output_scale")
    return out_dtype


def why_not_format(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason against kernels that store or multiply this format on this device, None if fine."""
    if device.type != "cuda":
        if interpreting() and dtype == torch.float8_e4m3fn:
            return "Triton's interpreter has no fp8"
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    found = capability(index)
    return format_blocker(dtype, found)


def format_blocker(dtype: torch.dtype, found: tuple[int, int]) -> str | None:
    """Reason against a format on a card of this compute capability, None where it runs."""
    needed = MIN_CAPABILITY.get(dtype)
    if needed is None:
        return f"{dtype} is not one of int8, float8_e4m3fn"
    if found < needed:
        name = str(dtype).removeprefix("torch.")
        return f"{name} needs compute capability {needed[0]}.{needed[1]}, this GPU has {found}"
    return None
