"""Public feed-forward layer: validation and dispatch.

    a = x fc1' + b1        y = gelu(a) fc2'

Autograd of the plain composition keeps ``a`` and ``gelu(a)``, two tensors of ``4 C`` channels of
the 16 that a block keeps. Here narrow layers in half precision keep neither: both directions are
one kernel, which holds the hidden map on the chip. Wider ones keep ``a`` and make ``gelu(a)``
again while they multiply the gradient by ``gelu'(a)``; their matrix products are cuBLAS's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastswin._triton.available import Impl, choose_impl, why_not_triton
from fastswin.ops.feed_forward.autograd import FeedForward


def feed_forward(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor,
    *,
    recompute: bool = True,
    impl: Impl = "auto",
) -> torch.Tensor:
    """``gelu(x @ fc1_weight.T + fc1_bias) @ fc2_weight.T``, exact (erf) GELU.

    fc2's bias is left to :func:`fastswin.ops.residual_add` and its kin, whose backward sums its
    gradient in passing.

    Args:
        x: ``[..., C]``.
        fc1_weight: ``[hidden, C]``; weights and bias are cast to x's dtype.
        fc1_bias: ``[hidden]`` or None.
        fc2_weight: ``[C_out, hidden]``.
        recompute: make ``gelu(a)``, and ``a`` where one kernel can, again in the backward;
            False keeps both.
        impl: "auto", "triton" or "reference".

    Returns:
        ``[..., C_out]`` in x's dtype.

    Raises:
        ValueError, TypeError: an argument is off; the message names it and the legal values.
        RuntimeError: ``impl="triton"`` cannot run here; the message says why.
    """
    if not x.dtype.is_floating_point:
        raise TypeError(f"x must be a float tensor, got {x.dtype}")
    hidden, C = fc1_weight.shape
    if x.ndim < 1 or x.shape[-1] != C:
        raise ValueError(f"x must be [..., {C}] for fc1_weight, got shape {tuple(x.shape)}")
    if fc1_bias is not None and tuple(fc1_bias.shape) != (hidden,):
        raise ValueError(f"fc1_bias must be [{hidden}], got {tuple(fc1_bias.shape)}")
    if fc2_weight.ndim != 2 or fc2_weight.shape[1] != hidden:
        raise ValueError(f"fc2_weight must be [C, {hidden}], got {tuple(fc2_weight.shape)}")
    for name, tensor in (
        ("fc1_weight", fc1_weight),
        ("fc1_bias", fc1_bias),
        ("fc2_weight", fc2_weight),
    ):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} but x is on {x.device}")
    if choose_impl(impl, "feed_forward", [why_not_triton(x.device, x.dtype)]) == "reference":
        fc1_bias = None if fc1_bias is None else fc1_bias.to(x.dtype)
        hidden_map = F.gelu(F.linear(x, fc1_weight.to(x.dtype), fc1_bias))
        return F.linear(hidden_map, fc2_weight.to(x.dtype))
    return FeedForward.apply(x, fc1_weight, fc1_bias, fc2_weight, recompute)
