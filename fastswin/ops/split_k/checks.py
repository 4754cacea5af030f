"""What a reader that adds the slices of a product onto its input requires of them."""

from __future__ import annotations

import torch

from fastswin.ops.split_k.config import MAX_SPLITS


def check_slices(partials: torch.Tensor | None, bias: torch.Tensor | None, x: torch.Tensor) -> None:
    """Raise a ValueError unless ``partials [splits, *x.shape]`` and ``bias [C]`` fit ``x``.

    Args:
        partials: fp32 (fp64 of fp64), contiguous; None where nothing is to be added.
        bias: of the product, or None.
        x: written, so contiguous.
    """
    if partials is None:
        if bias is not None:
            raise ValueError("partials_bias needs partials")
        return
    if partials.ndim < 2 or partials.shape[1:] != x.shape:
        raise ValueError(
            f"partials must be [splits, *{tuple(x.shape)}] like x, got {tuple(partials.shape)}"
        )
    if not 1 <= partials.shape[0] <= MAX_SPLITS:
        raise ValueError(f"partials must hold 1 to {MAX_SPLITS} slices, got {partials.shape[0]}")
    wide = torch.promote_types(x.dtype, torch.float32)
    if partials.dtype != wide:
        raise ValueError(f"partials must be {wide}, got {partials.dtype}")
    if not x.is_contiguous() or not partials.is_contiguous():
        raise ValueError("x and partials must be contiguous")
    if bias is not None and tuple(bias.shape) != (x.shape[-1],):
        raise ValueError(f"partials_bias must be [{x.shape[-1]}], got {tuple(bias.shape)}")
