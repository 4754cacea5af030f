"""Public product with LayerNorm and residual behind it: validation and dispatch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastswin._triton.available import Impl, choose_impl, why_no_gradient, why_not_triton
from fastswin.ops.cluster_linear.choice import default_post_norm_config
from fastswin.ops.cluster_linear.config import (
    ClusterLinearConfig,
    config_blocker,
    why_no_cluster_linear,
    why_not_aligned,
)


def linear_post_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    *,
    residual: torch.Tensor,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
    impl: Impl = "auto",
    config: ClusterLinearConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """``residual + layer_norm(x @ weight.T + bias)``, how a SwinV2 block ends its halves.

    Args:
        x: ``[..., K]``.
        weight, bias: ``[N, K]`` in x's dtype and ``[N]`` or None.
        norm_weight, norm_bias: ``[N]`` of the LayerNorm.
        residual: ``[..., N]`` in x's dtype.
        eps: of the LayerNorm.
        out: contiguous ``[..., N]`` where the result goes; may be ``residual``.
        impl: "auto", "triton" (compute capability 9.0, few columns) or "reference".
        config: tiles; a cluster of programs holds a row. None takes measured ones.
        pdl: programmatic dependent launch (_triton/pdl.py), where no kernel in flight writes a
            weight, bias or norm.

    Returns:
        ``[..., N]`` in x's dtype; sums and the norm in fp32.

    Raises:
        ValueError: a shape does not fit; the message names the argument.
        RuntimeError: ``impl="triton"`` cannot run here; the message says why.
    """
    N, K = weight.shape
    if x.shape[-1] != K:
        raise ValueError(f"x must end in weight's {K} input channels, got {tuple(x.shape)}")
    shape = (*x.shape[:-1], N)
    vectors = (("bias", bias), ("norm_weight", norm_weight), ("norm_bias", norm_bias))
    for name, vector in vectors:
        if vector is not None and tuple(vector.shape) != (N,):
            raise ValueError(f"{name} must be [{N}], got {tuple(vector.shape)}")
    for name, like in (("residual", residual), ("out", out)):
        if like is not None and tuple(like.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(like.shape)}")
    M = x.shape[:-1].numel()
    tiles = default_post_norm_config(M, N, K) if config is None else config
    chosen = choose_impl(
        impl,
        "linear_post_norm",
        [
            why_not_triton(x.device, x.dtype),
            why_no_gradient(x, weight, bias, norm_weight, norm_bias, residual),
            why_no_cluster_linear(x.device, x.dtype),
            f"no tiles for {M} rows, {N} columns of {K} channels" if tiles is None else None,
            None if tiles is None else config_blocker(tiles, M, N, K, post_norm=True),
            _why_not_operands(x, weight, residual, out),
        ],
    )
    if chosen == "reference":
        branch = F.linear(x, weight, None if bias is None else bias.to(x.dtype)).to(
            torch.promote_types(x.dtype, torch.float32)
        )
        affine = (norm_weight.to(branch.dtype), norm_bias.to(branch.dtype))
        y = (residual + F.layer_norm(branch, (N,), *affine, eps)).to(x.dtype)
        return y if out is None else out.copy_(y)
    from fastswin.ops.cluster_linear.launch import cluster_linear_fwd

    assert tiles is not None  # among the reasons above
    if out is None:
        out = x.new_empty(shape)
    cluster_linear_fwd(
        x.contiguous().view(M, K), weight.contiguous(),
        None if bias is None else bias.contiguous(), None, eps,
        residual.contiguous().view(M, N), out.view(M, N), tiles, pdl,
        post_norm=(norm_weight.contiguous(), norm_bias.contiguous()),
    )  # fmt: skip
    return out


def _why_not_operands(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, out: torch.Tensor | None
) -> str | None:
    if any(t.dtype != x.dtype for t in (weight, residual)):
        return f"weight is {weight.dtype}, residual {residual.dtype}, x is {x.dtype}"
    if out is not None and (out.dtype != x.dtype or not out.is_contiguous()):
        return "out is not contiguous in x's dtype"
    return why_not_aligned(x, weight, out)
