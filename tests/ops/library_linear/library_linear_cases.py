"""Random operands of the tests, in every format."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn


def operand(shape: tuple[int, ...], dtype: torch.dtype, seed: int, spread: float = 1.0):
    """Normal numbers in ``dtype`` on the CPU, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(*shape, generator=generator)).to(dtype)


def on(device: torch.device, tensors: dict) -> dict:
    """The tensors among the values on a device, the rest as it is."""
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}
