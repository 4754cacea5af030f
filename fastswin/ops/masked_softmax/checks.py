"""Argument checks of the masked-softmax operators: all before anything is launched or written."""

from __future__ import annotations

import math

import torch
from torch.utils.weak import WeakTensorKeyDictionary

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: Version of each float mask whose values have been looked at, so that a buffer used in every
#: block costs one look.
_checked_masks = WeakTensorKeyDictionary()


def values_readable(t: torch.Tensor) -> bool:
    """Whether a check may read values back: never while tracing or capturing a CUDA graph."""
    if torch.compiler.is_compiling() or t.device.type == "meta":
        return False
    if isinstance(t, torch._subclasses.FakeTensor):
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def check_arguments(
    x: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    causal: bool,
    seq_lens: torch.Tensor | None,
) -> None:
    """Raise on anything that :func:`masked_softmax` refuses."""
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"x must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.ndim < 1:
        raise ValueError("x must have at least one axis [..., N], got a scalar")
    if isinstance(scale, torch.Tensor) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite Python number, got {scale!r}")
    if bias is not None:
        if bias.dtype not in FLOAT_DTYPES:
            raise TypeError(f"bias must be a float tensor (it is added), got {bias.dtype}")
        check_broadcast("bias", bias, x)
    if mask is not None:
        check_mask_dtype(mask)
        check_broadcast("mask", mask, x)
        refuse_zero_one(mask)
    if causal and x.ndim < 2:
        raise ValueError(f"causal needs x [..., q, k], got shape {tuple(x.shape)}")
    if seq_lens is not None:
        check_seq_lens(seq_lens, x)


def check_broadcast(name: str, t: torch.Tensor, x: torch.Tensor) -> None:
    """``t`` must lie on x's device and broadcast to x's shape without enlarging it."""
    if t.device != x.device:
        raise ValueError(f"{name} is on {t.device} and x on {x.device}; move {name} to x's device")
    fits = t.ndim <= x.ndim and all(
        own in (1, size) for own, size in zip(reversed(t.shape), reversed(x.shape), strict=False)
    )
    if not fits:
        raise ValueError(
            f"{name} of shape {tuple(t.shape)} does not broadcast to x's shape {tuple(x.shape)}"
        )


def check_mask_dtype(mask: torch.Tensor) -> None:
    """bool and uint8 hide, float is added, everything else is refused by name."""
    if mask.dtype not in (torch.bool, torch.uint8, *FLOAT_DTYPES):
        raise TypeError(
            f"mask must be bool or uint8 (non-zero hides the key) or float (added), "
            f"got {mask.dtype}; pass mask.bool()"
        )


def refuse_zero_one(mask: torch.Tensor) -> None:
    """A float mask of only 0 and 1 is almost surely a bool mask of the wrong type."""
    if not mask.dtype.is_floating_point or mask.numel() == 0 or not values_readable(mask):
        return
    version = 0 if mask.is_inference() else mask._version
    if _checked_masks.get(mask) == version:
        return
    ones = mask == 1
    if bool((ones.any() & (ones | (mask == 0)).all()).item()):
        raise ValueError(
            "mask is a float mask that holds only 0 and 1; float masks are added to the scores. "
            "Pass mask.bool() to hide keys where it is 1"
        )
    if not mask.is_inference():
        _checked_masks[mask] = version


def check_seq_lens(seq_lens: torch.Tensor, x: torch.Tensor) -> None:
    """One int length per sample, inside ``[0, S]``; values are read only where that is allowed."""
    if x.ndim < 3 or x.shape[-1] != x.shape[-2]:
        raise ValueError(
            f"seq_lens needs square scores x [B, ..., S, S], got shape {tuple(x.shape)}"
        )
    if seq_lens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"seq_lens must be int32 or int64, got {seq_lens.dtype}")
    if tuple(seq_lens.shape) != (x.shape[0],):
        raise ValueError(
            f"seq_lens must be [{x.shape[0]}] for x of shape {tuple(x.shape)}, "
            f"got {tuple(seq_lens.shape)}"
        )
    if seq_lens.device.type != "cpu" and seq_lens.device != x.device:
        raise ValueError(
            f"seq_lens is on {seq_lens.device} and x on {x.device}; use x's device or the CPU"
        )
    if seq_lens.device != x.device and not values_readable(x) and x.is_cuda:
        raise ValueError(
            f"seq_lens is on the CPU; while compiling or capturing a CUDA graph it must be on "
            f"x's device {x.device}"
        )
    if seq_lens.numel() == 0 or not values_readable(seq_lens):
        return
    low, high = torch.stack(seq_lens.aminmax()).tolist()
    if low < 0 or high > x.shape[-1]:
        raise ValueError(
            f"seq_lens must lie in [0, {x.shape[-1]}] for x of shape {tuple(x.shape)}, "
            f"got values from {low} to {high}"
        )


def check_in_place(x: torch.Tensor) -> None:
    """An expanded tensor has fewer elements than positions and cannot hold the result."""
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(
            f"x of shape {tuple(x.shape)} and strides {x.stride()} overlaps itself; "
            "masked_softmax_ writes into x, pass x.contiguous()"
        )
