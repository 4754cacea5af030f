"""Public residual and norm operators: validation and dispatch.

A Swin block meets the residual stream at its two norms and its two adds. As separate operators
each reads and writes the stream; here an add and the norm behind it are one kernel, the bias of
the projection and the drop-path factor are applied on the way, and the backward of both is one
kernel as well, with the gradients of the norm and of that bias.
"""

from __future__ import annotations

import torch

from fastswin._triton.available import Impl, choose_impl, why_not_triton
from fastswin.ops.residual_norm import autograd
from fastswin.ops.residual_norm.reference import (
    layer_norm_add_ref,
    layer_norm_ref,
    residual_add_ref,
)

#: One program holds a whole row.
MAX_CHANNELS = 8192

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def residual_add(
    x: torch.Tensor,
    branch: torch.Tensor,
    *,
    branch_bias: torch.Tensor | None = None,
    branch_scale: torch.Tensor | None = None,
    stream_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """``x + branch_scale * (branch + branch_bias)``, forward and backward.

    Args:
        x: the residual stream ``[B, ..., C]``.
        branch: like ``x``, in any float dtype.
        branch_bias: ``[C]``, the bias that the projection left out; None adds nothing.
        branch_scale: ``[B]``, one factor per image (drop path); no gradient flows to it.
        stream_dtype: dtype of the result; None promotes x's and branch's, as ``x + branch`` does.
        impl: "auto", "triton" or "reference".

    Returns:
        ``[B, ..., C]``, contiguous.

    Raises:
        ValueError, TypeError: an argument is off; the message names it and the legal values.
        RuntimeError: ``impl="triton"`` cannot run here; the message says why.
    """
    stream_dtype = _check(x, branch, branch_bias, branch_scale, stream_dtype)
    if _chosen(impl, "residual_add", x, branch, stream_dtype) == "reference":
        return residual_add_ref(x, branch, branch_bias, branch_scale, stream_dtype)
    return autograd.ResidualAdd.apply(x, branch, branch_bias, branch_scale, stream_dtype)


def add_layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    eps: float = 1e-5,
    branch: torch.Tensor | None = None,
    branch_bias: torch.Tensor | None = None,
    branch_scale: torch.Tensor | None = None,
    stream_dtype: torch.dtype | None = None,
    norm_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stream after an add, and its LayerNorm: ``s = residual_add(...)``, ``n = LN(s)``.

    Without ``branch`` the stream is ``x`` itself. It is returned all the same: used from there on,
    its gradient joins the norm's inside one kernel instead of in a pass of its own.

    Args:
        x: the residual stream ``[B, ..., C]``.
        weight, bias: ``[C]`` of the LayerNorm, or None (ones, zeros).
        eps: added to the variance.
        branch, branch_bias, branch_scale, stream_dtype: as in :func:`residual_add`.
        norm_dtype: dtype of the normed rows; None takes the stream's. Under autocast the half
            dtype saves a pass over them, since a matrix product reads them next.
        impl: "auto", "triton" or "reference".

    Returns:
        ``(stream, normed)``, each ``[B, ..., C]``. Statistics are fp32 (fp64 for fp64).

    Raises:
        ValueError, TypeError, RuntimeError: as in :func:`residual_add`.
    """
    stream_dtype = _check(x, branch, branch_bias, branch_scale, stream_dtype)
    _check_vectors(x, weight=weight, bias=bias)
    norm_dtype = norm_dtype or stream_dtype
    _check_dtype("norm_dtype", norm_dtype)
    if _chosen(impl, "add_layer_norm", x, branch, stream_dtype, norm_dtype) == "reference":
        stream = x.to(stream_dtype)
        if branch is not None:
            stream = residual_add_ref(x, branch, branch_bias, branch_scale, stream_dtype)
        return stream, layer_norm_ref(stream, weight, bias, eps, norm_dtype)
    if branch is None:
        x = x.to(stream_dtype)
    return autograd.AddLayerNorm.apply(
        x, branch, weight, bias, branch_bias, branch_scale, eps, stream_dtype, norm_dtype
    )


def layer_norm_add(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    eps: float = 1e-5,
    branch_bias: torch.Tensor | None = None,
    branch_scale: torch.Tensor | None = None,
    stream_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """``x + branch_scale * LN(branch + branch_bias)``, the residual of a V2 block.

    Args:
        x, branch, branch_bias, branch_scale, stream_dtype: as in :func:`residual_add`.
        weight, bias: ``[C]`` of the LayerNorm, or None (ones, zeros).
        eps: added to the variance.
        impl: "auto", "triton" or "reference".

    Returns:
        ``[B, ..., C]``, contiguous.

    Raises:
        ValueError, TypeError, RuntimeError: as in :func:`residual_add`.
    """
    stream_dtype = _check(x, branch, branch_bias, branch_scale, stream_dtype)
    _check_vectors(x, weight=weight, bias=bias)
    if _chosen(impl, "layer_norm_add", x, branch, stream_dtype) == "reference":
        return layer_norm_add_ref(
            x, branch, weight, bias, eps, branch_bias, branch_scale, stream_dtype
        )
    return autograd.LayerNormAdd.apply(
        x, branch, weight, bias, branch_bias, branch_scale, eps, stream_dtype
    )


def _chosen(
    impl: Impl, op: str, x: torch.Tensor, branch: torch.Tensor | None, *dtypes: torch.dtype
) -> str:
    blockers = [why_not_triton(x.device, dtype) for dtype in (x.dtype, *dtypes)]
    if branch is not None:
        blockers.append(why_not_triton(x.device, branch.dtype))
    C = x.shape[-1]
    blockers.append(f"{C} channels exceed {MAX_CHANNELS}" if C > MAX_CHANNELS else None)
    return choose_impl(impl, op, blockers)


def _check(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    branch_scale: torch.Tensor | None,
    stream_dtype: torch.dtype | None,
) -> torch.dtype:
    """Refuse what does not fit; the dtype of the stream."""
    if x.ndim < 2 or x.shape[-1] == 0:
        raise ValueError(f"x must be [B, ..., C] with C >= 1, got shape {tuple(x.shape)}")
    _check_dtype("x", x.dtype)
    if branch is None:
        for name, extra in (("branch_bias", branch_bias), ("branch_scale", branch_scale)):
            if extra is not None:
                raise ValueError(f"{name} needs a branch")
        found = x.dtype
    else:
        if branch.shape != x.shape:
            raise ValueError(f"branch must be {tuple(x.shape)} like x, got {tuple(branch.shape)}")
        _check_dtype("branch", branch.dtype)
        found = torch.promote_types(x.dtype, branch.dtype)
    _check_vectors(x, branch_bias=branch_bias)
    if branch_scale is not None and tuple(branch_scale.shape) != (x.shape[0],):
        raise ValueError(
            f"branch_scale must be [{x.shape[0]}], one per image, got {tuple(branch_scale.shape)}"
        )
    for name, tensor in (("branch", branch), ("branch_scale", branch_scale)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} but x is on {x.device}")
    _check_dtype("stream_dtype", stream_dtype or found)
    return stream_dtype or found


def _check_vectors(x: torch.Tensor, **vectors: torch.Tensor | None) -> None:
    for name, vector in vectors.items():
        if vector is None:
            continue
        if tuple(vector.shape) != (x.shape[-1],):
            raise ValueError(f"{name} must be [{x.shape[-1]}], got {tuple(vector.shape)}")
        if vector.device != x.device:
            raise ValueError(f"{name} is on {vector.device} but x is on {x.device}")


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in _FLOATS:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {dtype}")
