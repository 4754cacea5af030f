"""8-bit storage as plain PyTorch: the definition that every quantising kernel is tested against.

    inverse = 1 / scale, rounded to float32 (a scale of 0 counts as 1, so zeros stay zeros)
    int8      q = round_half_even(clamp(x * inverse, -127, 127));  NaN becomes 0
    fp8       q = e4m3(clamp(x * inverse, -448, 448));             NaN stays NaN

Infinities saturate. This is fastswin.quant's arithmetic; an int8 tensor cannot say NaN, and the
wide residual stream beside it still does.
"""

from __future__ import annotations

import torch

#: Storage formats and the largest magnitude of each.
LARGEST: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

#: Smallest step of a token: its inverse must be finite.
SMALLEST_STEP = torch.finfo(torch.float32).tiny


def inverse_of(scale: torch.Tensor) -> torch.Tensor:
    """``1 / scale``, 1 where the scale is 0; fp32 of any shape."""
    return torch.where(scale == 0, 1.0, scale.float()).reciprocal()


def store(scaled: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Saturate and round numbers that are already in steps: fp32 of any shape to ``dtype``."""
    clamped = scaled.clamp(-LARGEST[dtype], LARGEST[dtype])
    if dtype == torch.int8:
        return clamped.nan_to_num(nan=0.0).round().to(torch.int8)
    return clamped.to(dtype)


def quantize_ref(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x [..., C]`` with ``scale [parts]``; see the public function."""
    inverse = inverse_of(scale).repeat_interleave(x.shape[-1] // scale.numel())
    return store(x.float() * inverse, dtype)


def token_scale_ref(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Steps ``[...]`` of the rows of ``x [..., C]``, 1 for an all-zero row."""
    amax = x.float().abs().amax(dim=-1)
    step = (amax / LARGEST[dtype]).clamp(min=SMALLEST_STEP)
    return torch.where(amax == 0, 1.0, step)


def quantize_per_token_ref(
    x: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [..., C]`` to the quantised rows and their steps ``[...]``."""
    row_scale = token_scale_ref(x, dtype)
    return store(x.float() * row_scale.reciprocal()[..., None], dtype), row_scale
