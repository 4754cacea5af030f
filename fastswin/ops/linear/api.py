"""Public fused linear layer: validation and dispatch."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from fastswin._triton.available import (
    Impl,
    choose_impl,
    why_no_gradient,
    why_not_half,
    why_not_triton,
)
from fastswin.ops.linear.config import (
    GemmConfig,
    LayerNormLinearConfig,
    layer_norm_linear_blocker,
)

Activation = Literal["gelu"]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
    layer_norm_eps: float | None = None,
    offset: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    impl: Impl = "auto",
    config: GemmConfig | LayerNormLinearConfig | None = None,
) -> torch.Tensor:
    """``residual + activation(norm(x) @ weight.T + bias)`` in one kernel.

    Args:
        x: ``[..., K]``, contiguous rows.
        weight: ``[N, K]`` in x's dtype, as torch.nn.Linear stores it.
        bias: ``[N]`` or None.
        activation: None or "gelu" (erf, to half a half-precision rounding).
        residual: ``[..., N]`` or None; excludes ``layer_norm_eps``.
        layer_norm_eps: normalises each row of x first, without affine (fold it into ``weight``
            and ``bias``); None leaves x as it is.
        offset: ``[K]`` added to every row before that norm; needs ``layer_norm_eps``.
        out: ``[..., N]`` where the result goes; may be ``residual``.
        impl: "auto", "triton" or "reference".
        config: tiles of the kernel, a :class:`LayerNormLinearConfig` with ``layer_norm_eps`` and a
            :class:`GemmConfig` without; None takes the heuristic.

    Returns:
        ``[..., N]`` in x's dtype; products accumulate in fp32.

    Raises:
        ValueError: a shape or choice does not fit; the message names the argument.
    """
    N, K = weight.shape
    if x.shape[-1] != K:
        raise ValueError(f"x must end in weight's {K} input channels, got {tuple(x.shape)}")
    if bias is not None and tuple(bias.shape) != (N,):
        raise ValueError(f"bias must be [{N}], got {tuple(bias.shape)}")
    if activation not in (None, "gelu"):
        raise ValueError(f"activation must be None or 'gelu', got {activation!r}")
    shape = (*x.shape[:-1], N)
    for name, like in (("residual", residual), ("out", out)):
        if like is not None and tuple(like.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(like.shape)}")
    if residual is not None and layer_norm_eps is not None:
        raise ValueError("residual and layer_norm_eps exclude each other")
    if offset is not None and (layer_norm_eps is None or tuple(offset.shape) != (K,)):
        raise ValueError(
            f"offset must be [{K}] and needs layer_norm_eps, got {tuple(offset.shape)}"
        )
    expected = GemmConfig if layer_norm_eps is None else LayerNormLinearConfig
    if config is not None and not isinstance(config, expected):
        raise ValueError(f"config must be a {expected.__name__}, got {type(config).__name__}")
    chosen = choose_impl(
        impl,
        "linear",
        [
            why_not_triton(x.device, x.dtype),
            why_not_half(x.dtype),
            why_no_gradient(x, weight, bias, residual, offset),
            layer_norm_linear_blocker(K) if layer_norm_eps is not None else None,
            f"weight is {weight.dtype}, x is {x.dtype}" if weight.dtype != x.dtype else None,
        ],
    )
    if chosen == "reference":
        return _linear_ref(x, weight, bias, activation, residual, layer_norm_eps, offset, out)
    from fastswin.ops.linear.forward import layer_norm_linear_fwd, linear_fwd

    if isinstance(config, LayerNormLinearConfig) or layer_norm_eps is not None:
        assert layer_norm_eps is not None  # checked with the type of config
        assert not isinstance(config, GemmConfig)
        return layer_norm_linear_fwd(
            x, weight, bias, activation, layer_norm_eps, offset, out, config
        )
    return linear_fwd(x, weight, bias, activation, residual, out, config)


def _linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
    residual: torch.Tensor | None,
    layer_norm_eps: float | None,
    offset: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    dtype = x.dtype
    if layer_norm_eps is not None:
        compute = torch.promote_types(dtype, torch.float32)
        x = x.to(compute) if offset is None else x.to(compute) + offset.to(compute)
        x = F.layer_norm(x, (x.shape[-1],), eps=layer_norm_eps).to(dtype)
    y = F.linear(x, weight, None if bias is None else bias.to(dtype))
    if activation == "gelu":
        y = F.gelu(y)
    if residual is not None:
        y = residual + y
    return y if out is None else out.copy_(y)
