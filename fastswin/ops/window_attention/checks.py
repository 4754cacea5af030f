"""Checks of the arguments that every operator with windows takes; each names its argument."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Pair = tuple[int, int]


def check_stream(x: torch.Tensor, num_heads: int) -> None:
    """A residual stream ``[B, H, W, C]`` of so many heads.

    Raises:
        ValueError: it is none.
    """
    if x.ndim != 4 or num_heads < 1 or x.shape[3] % num_heads:
        raise ValueError(
            f"x must be [B, H, W, C] with C a multiple of num_heads={num_heads}, "
            f"got {tuple(x.shape)}"
        )


def check_shapes(expected: Mapping[str, tuple[torch.Tensor | None, tuple[int, ...]]]) -> None:
    """Tensors by name with the shapes that they must have; None fits any.

    Raises:
        ValueError: one has another.
    """
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(tensor.shape)}")


def check_windows(window_size: Pair, shift_size: Pair) -> None:
    """Sides of a window and its cyclic shift, in tokens.

    Raises:
        ValueError: a side is below 1, or a shift negative or no smaller than its side.
    """
    if len(window_size) != 2 or min(window_size) < 1:
        raise ValueError(f"window_size must be two positive integers, got {window_size}")
    if len(shift_size) != 2 or not all(
        0 <= s < w for s, w in zip(shift_size, window_size, strict=True)
    ):
        raise ValueError(
            f"shift_size must satisfy 0 <= shift < window on each axis, got {shift_size} for "
            f"window_size {window_size}"
        )


def resolve_scale(
    scale: float | None, logit_scale: torch.Tensor | None, num_heads: int, head_dim: int
) -> float:
    """The factor of V1's scores, ``head_dim ** -0.5`` where none is given.

    Raises:
        ValueError: V2's temperatures are given as well, or not one for each head.
    """
    if logit_scale is not None and scale is not None:
        raise ValueError("give scale (V1) or logit_scale (V2), not both")
    if logit_scale is not None and logit_scale.numel() != num_heads:
        raise ValueError(f"logit_scale must hold {num_heads} numbers, got {logit_scale.numel()}")
    return head_dim**-0.5 if scale is None else float(scale)
