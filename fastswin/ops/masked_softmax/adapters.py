"""Masked softmax under the names and argument order of apex's and Megatron's fused softmax.

    from fastswin.ops.masked_softmax.adapters import ScaledMaskedSoftmax, FusedScaleMaskSoftmax

A mask of any dtype hides where it is non-zero (1 = hide), as there. What differs, always towards
the definition: any length, fp32 too, the scale is not narrowed to the scores' dtype, a fully
hidden row is zeros whatever the shape, hidden keys are excluded instead of set to -10000, and
the upstream gradient is never overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastswin.ops.masked_softmax.api import masked_softmax


def _hide(mask: torch.Tensor | None) -> torch.Tensor | None:
    if mask is None or mask.dtype in (torch.bool, torch.uint8):
        return mask
    return mask != 0


def _number(scale: float | torch.Tensor | None) -> float:
    if scale is None:
        return 1.0
    return float(scale)  # a one-element tensor, as the extension took, costs a read back


def scaled_masked_softmax(
    inputs: torch.Tensor, mask: torch.Tensor | None, scale: float | torch.Tensor
) -> torch.Tensor:
    """``softmax(scale * inputs)`` with keys hidden where ``mask`` is non-zero.

    Args:
        inputs: ``[b, h, sq, sk]`` scores.
        mask: ``[1 or b, 1, sq, sk]`` of any dtype, 1 hides; None hides nothing.
        scale: a number or a one-element tensor.

    Returns:
        ``[b, h, sq, sk]`` in the inputs' dtype.

    Raises:
        ValueError, TypeError: as in :func:`fastswin.ops.masked_softmax`.
    """
    return masked_softmax(inputs, scale=_number(scale), mask=_hide(mask))


#: apex's variant without length limits; here there is only one.
generic_scaled_masked_softmax = scaled_masked_softmax


def scaled_softmax(inputs: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """``softmax(scale * inputs)`` of ``[b, h, sq, sk]`` scores."""
    return masked_softmax(inputs, scale=_number(scale))


def scaled_upper_triang_masked_softmax(
    inputs: torch.Tensor, _mask: torch.Tensor | None, scale: float | torch.Tensor
) -> torch.Tensor:
    """Causal ``softmax(scale * inputs)`` of ``[..., sq, sq]``; the second argument is ignored.

    Raises:
        ValueError: the scores are not square.
    """
    if inputs.ndim < 2 or inputs.shape[-1] != inputs.shape[-2]:
        raise ValueError(f"inputs must be square [..., sq, sq], got {tuple(inputs.shape)}")
    return masked_softmax(inputs, scale=_number(scale), causal=True)


class ScaledMaskedSoftmax:
    """``ScaledMaskedSoftmax.apply(inputs, mask, scale)``, as the autograd function there."""

    apply = staticmethod(scaled_masked_softmax)


class ScaledSoftmax:
    """``ScaledSoftmax.apply(inputs, scale)``."""

    apply = staticmethod(scaled_softmax)


class ScaledUpperTriangMaskedSoftmax:
    """``ScaledUpperTriangMaskedSoftmax.apply(inputs, scale)``."""

    @staticmethod
    def apply(inputs: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        """Causal ``softmax(scale * inputs)`` of square scores."""
        return scaled_upper_triang_masked_softmax(inputs, None, scale)


class FusedScaleMaskSoftmax(torch.nn.Module):
    """Scale, hide-mask and softmax with the constructor of Megatron's module.

    Args:
        input_in_fp16: inputs are float16; checked against ``input_in_bf16`` only.
        input_in_bf16: inputs are bfloat16.
        attn_mask_type: a padding or causal kind: an enum member, or its name.
        scaled_masked_softmax_fusion: accepted; every shape is fused here.
        mask_func: accepted; a hidden key is excluded exactly instead.
        softmax_in_fp32: accepted; arithmetic is always fp32.
        scale: factor on the scores; needs ``softmax_in_fp32``, as there.

    Raises:
        ValueError: both half types, or a scale without ``softmax_in_fp32``.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: Any,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[..., torch.Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise ValueError("input_in_fp16 and input_in_bf16 exclude each other")
        if scale is not None and not softmax_in_fp32:
            raise ValueError("a scale needs softmax_in_fp32=True")
        name = str(getattr(attn_mask_type, "name", attn_mask_type))
        if name not in ("padding", "causal", "no_mask"):
            raise ValueError(
                f"attn_mask_type must be padding, causal or no_mask, got {attn_mask_type!r}"
            )
        self.causal = name == "causal"
        self.scale = _number(scale)

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """``[b, h, sq, sk]`` scores and a hide-mask (or None) to probabilities."""
        if self.causal and inputs.shape[-1] == inputs.shape[-2]:
            return masked_softmax(inputs, scale=self.scale, mask=_hide(mask), causal=True)
        return masked_softmax(inputs, scale=self.scale, mask=_hide(mask))
