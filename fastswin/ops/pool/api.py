"""Public norm-and-pool, with and without a head: validation and dispatch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastswin._triton.available import Impl, choose_impl, why_no_gradient, why_not_triton

MAX_CHANNELS = 8192

#: Widest row that fits beside the head's strip in registers.
MAX_HEAD_CHANNELS = 2048


def norm_pool(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float = 1e-5,
    offset: torch.Tensor | None = None,
    impl: Impl = "auto",
    pdl: bool = False,
) -> torch.Tensor:
    """Mean over tokens of the final LayerNorm: ``[B, H, W, C] -> [B, C]``.

    Args:
        x: ``[B, H, W, C]``, contiguous.
        weight, bias: ``[C]`` of the LayerNorm.
        eps: added to the variance.
        offset: ``[C]`` added to every token first; None adds nothing.
        impl: "auto", "triton" or "reference".
        pdl: programmatic dependent launch (_triton/pdl.py), where no kernel in flight writes
            ``weight``, ``bias`` or ``offset``.

    Returns:
        ``[B, C]`` in x's dtype; sums in fp32, in a fixed order.

    Raises:
        ValueError: a shape does not fit; the message names the argument.
    """
    if x.ndim != 4:
        raise ValueError(f"x must be [B, H, W, C], got shape {tuple(x.shape)}")
    C = x.shape[3]
    for name, vector in (("weight", weight), ("bias", bias), ("offset", offset)):
        if vector is not None and tuple(vector.shape) != (C,):
            raise ValueError(f"{name} must be [{C}], got {tuple(vector.shape)}")
    chosen = choose_impl(
        impl,
        "norm_pool",
        [
            why_not_triton(x.device, x.dtype),
            why_no_gradient(x, weight, bias, offset),
            f"{C} channels exceed {MAX_CHANNELS}" if C > MAX_CHANNELS else None,
        ],
    )
    if chosen == "reference":
        compute = torch.promote_types(x.dtype, torch.float32)
        y = x.to(compute) if offset is None else x.to(compute) + offset.to(compute)
        y = F.layer_norm(y, (C,), weight.to(compute), bias.to(compute), eps)
        return y.mean(dim=(1, 2)).to(x.dtype)
    from fastswin.ops.pool.forward import norm_pool_fwd

    return norm_pool_fwd(x, weight, bias, eps, offset, pdl)


def norm_pool_head(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    head_weight: torch.Tensor,
    head_bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    offset: torch.Tensor | None = None,
    impl: Impl = "auto",
    pdl: bool = False,
) -> torch.Tensor:
    """:func:`norm_pool` and the classifier in one kernel, for few images.

    Args:
        x, weight, bias, eps, offset, impl, pdl: as in :func:`norm_pool`.
        head_weight: ``[classes, C]`` in x's dtype.
        head_bias: ``[classes]`` or None.

    Returns:
        ``[B, classes]`` in x's dtype; the pooled vector stays in fp32.

    Raises:
        ValueError: a shape does not fit; the message names the argument.
    """
    if x.ndim != 4:
        raise ValueError(f"x must be [B, H, W, C], got shape {tuple(x.shape)}")
    C, classes = x.shape[3], head_weight.shape[0]
    if tuple(head_weight.shape) != (classes, C):
        raise ValueError(f"head_weight must be [classes, {C}], got {tuple(head_weight.shape)}")
    vectors = {"weight": (weight, C), "bias": (bias, C), "offset": (offset, C)}
    for name, (vector, size) in (vectors | {"head_bias": (head_bias, classes)}).items():
        if vector is not None and tuple(vector.shape) != (size,):
            raise ValueError(f"{name} must be [{size}], got {tuple(vector.shape)}")
    chosen = choose_impl(
        impl,
        "norm_pool_head",
        [
            why_not_triton(x.device, x.dtype),
            why_no_gradient(x, weight, bias, head_weight, head_bias, offset),
            f"{C} channels exceed {MAX_HEAD_CHANNELS}" if C > MAX_HEAD_CHANNELS else None,
        ],
    )
    if chosen == "reference":
        pooled = norm_pool(x, weight, bias, eps=eps, offset=offset, impl="reference")
        head_bias = None if head_bias is None else head_bias.to(x.dtype)
        return F.linear(pooled, head_weight.to(x.dtype), head_bias)
    from fastswin.ops.pool.head import norm_pool_head_fwd

    return norm_pool_head_fwd(x, weight, bias, head_weight, head_bias, eps, offset, pdl)
