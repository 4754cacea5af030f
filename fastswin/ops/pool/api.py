"""Public norm-and-pool: validation and dispatch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastswin._triton.available import Impl, choose_impl, why_no_gradient, why_not_triton

MAX_CHANNELS = 8192


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
