"""Public 2x2 gather and merging: validation and dispatch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastswin._triton.available import (
    Impl,
    choose_impl,
    why_no_gradient,
    why_not_half,
    why_not_triton,
)
from fastswin._triton.tiles import cdiv
from fastswin.ops.linear.config import OneShotConfig, one_shot_blocker, why_no_one_shot
from fastswin.ops.patch_merging.autograd import GatherLayerNorm, GatherLayerNormLinear
from fastswin.ops.patch_merging.config import MAX_CHANNELS
from fastswin.ops.quantize.checks import check_steps, resolve_output, why_not_format
from fastswin.ops.quantize.reference import quantize_ref
from fastswin.ops.residual_norm.reference import layer_norm_ref

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def gather_neighbours(
    x: torch.Tensor,
    *,
    layer_norm_eps: float | None = None,
    offset: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    marks: torch.Tensor | None = None,
    impl: Impl = "auto",
    pdl: bool = False,
) -> torch.Tensor:
    """2x2 neighbours to one row, optionally normalised: what patch merging projects.

    Args:
        x: ``[B, H, W, C]``, contiguous; odd sides are zero-padded at the bottom and right.
        layer_norm_eps: LayerNorm (without affine) over the 4C channels; None leaves them as they
            are. Padded neighbours enter it as zeros.
        offset: ``[C]`` added to every real token first; None adds nothing.
        output_scale: fp32 ``[1]``: rows are stored in 8 bits with this step
            (:func:`fastswin.ops.quantize`). None stores x's dtype.
        out_dtype: with ``output_scale``, ``torch.int8`` (None) or ``torch.float8_e4m3fn``.
        marks: fp32 ``[B, ceil(H/2), ceil(W/2)]``, written: 1, or NaN where one of the four tokens
            is not finite, what int8 cannot say (rows marked so hold any numbers). Needs
            ``output_scale``; None writes nothing.
        impl: "auto", "triton" or "reference".
        pdl: programmatic dependent launch (_triton/pdl.py), where no kernel in flight writes
            ``offset`` or ``output_scale``.

    Returns:
        ``[B, ceil(H/2), ceil(W/2), 4C]`` in x's dtype, or in 8 bits; order (even row, even
        column), (odd, even), (even, odd), (odd, odd), as the official PatchMerging has it.

    Raises:
        ValueError: a shape does not fit; the message names the argument.
    """
    if x.ndim != 4:
        raise ValueError(f"x must be [B, H, W, C], got shape {tuple(x.shape)}")
    C = x.shape[3]
    if offset is not None and tuple(offset.shape) != (C,):
        raise ValueError(f"offset must be [{C}], got {tuple(offset.shape)}")
    stored = resolve_output(output_scale, out_dtype, x.dtype)
    if output_scale is not None:
        check_steps(output_scale, "output_scale", x, 4 * C, parts=(1,))
    elif stored != x.dtype:
        raise ValueError(f"out_dtype must be None or {x.dtype} without output_scale, got {stored}")
    _check_marks(marks, x, output_scale is not None)
    chosen = choose_impl(
        impl,
        "gather_neighbours",
        [
            why_not_triton(x.device, x.dtype),
            why_no_gradient(x, offset),
            f"{C} channels exceed {MAX_CHANNELS}" if C > MAX_CHANNELS else None,
            None if output_scale is None else why_not_format(x.device, stored),
        ],
    )
    if chosen == "reference":
        if marks is not None:
            marks.copy_(_token_marks_ref(x))
        if output_scale is not None:
            y = _gather_neighbours_ref(x, layer_norm_eps, offset, torch.float32)
            return quantize_ref(y, output_scale, stored)
        return _gather_neighbours_ref(x, layer_norm_eps, offset, x.dtype)
    if output_scale is not None:
        from fastswin.ops.patch_merging.quantized import gather_quantize_fwd

        return gather_quantize_fwd(x, layer_norm_eps, offset, output_scale, stored, marks, pdl)
    from fastswin.ops.patch_merging.forward import gather_neighbours_fwd

    return gather_neighbours_fwd(x, layer_norm_eps, offset, pdl)


def _check_marks(marks: torch.Tensor | None, x: torch.Tensor, narrow: bool) -> None:
    if marks is None:
        return
    if not narrow:
        raise ValueError("marks need output_scale")
    B, H, W, _ = x.shape
    shape = (B, cdiv(H, 2), cdiv(W, 2))
    if tuple(marks.shape) != shape or marks.dtype != torch.float32 or not marks.is_contiguous():
        raise ValueError(
            f"marks must be contiguous float32 {shape}, got {marks.dtype} {tuple(marks.shape)}"
        )


def gather_layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float | None = 1e-5,
    out_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """What patch merging projects, forward and backward: ``LN(2x2 neighbours)`` as one row each.

    Args:
        x: ``[B, H, W, C]``; odd sides are zero-padded at the bottom and right.
        weight, bias: ``[4C]`` of the LayerNorm, or None (ones, zeros).
        eps: added to the variance; None gathers without a norm (V2), and without weight and bias.
        out_dtype: dtype of the rows; None takes x's. Under autocast the half dtype saves a pass
            over them, since a matrix product reads them next.
        impl: "auto", "triton" or "reference".

    Returns:
        ``[B, ceil(H/2), ceil(W/2), 4C]``; order as in :func:`gather_neighbours`. Statistics are
        fp32 (fp64 for fp64).

    Raises:
        ValueError, TypeError: an argument is off; the message names it and the legal values.
        RuntimeError: ``impl="triton"`` cannot run here; the message says why.
    """
    out_dtype = out_dtype or x.dtype
    if _checked_rows("gather_layer_norm", x, weight, bias, eps, out_dtype, impl) == "reference":
        return _gather_layer_norm_ref(x, weight, bias, eps, out_dtype)
    return GatherLayerNorm.apply(x, weight, bias, eps or 0.0, eps is not None, out_dtype)


def gather_layer_norm_linear(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    linear_weight: torch.Tensor,
    *,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Patch merging for training: :func:`gather_layer_norm` and its projection, rows not kept.

    The backward makes the rows again for the gradient of ``linear_weight``: one more pass over the
    map instead of a copy of it for as long as the step lasts.

    Args:
        x, weight, bias, eps, out_dtype, impl: as in :func:`gather_layer_norm`, with a norm.
        linear_weight: ``[K, 4C]``, cast to ``out_dtype`` for the products.

    Returns:
        ``[B, ceil(H/2), ceil(W/2), K]`` in ``out_dtype``.

    Raises:
        ValueError, TypeError, RuntimeError: as in :func:`gather_layer_norm`.
    """
    out_dtype = out_dtype or x.dtype
    if x.ndim == 4 and (linear_weight.ndim != 2 or linear_weight.shape[1] != 4 * x.shape[3]):
        raise ValueError(
            f"linear_weight must be [K, {4 * x.shape[3]}], got {tuple(linear_weight.shape)}"
        )
    chosen = _checked_rows("gather_layer_norm_linear", x, weight, bias, eps, out_dtype, impl)
    if chosen == "reference":
        rows = _gather_layer_norm_ref(x, weight, bias, eps, out_dtype)
        return F.linear(rows, linear_weight.to(out_dtype))
    return GatherLayerNormLinear.apply(x, weight, bias, linear_weight, eps, out_dtype)


def _checked_rows(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float | None,
    out_dtype: torch.dtype,
    impl: Impl,
) -> str:
    """Refuse what does not fit; which implementation runs."""
    if x.ndim != 4 or x.shape[3] == 0:
        raise ValueError(f"x must be [B, H, W, C] with C >= 1, got shape {tuple(x.shape)}")
    C = x.shape[3]
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is None:
            continue
        if eps is None:
            raise ValueError(f"{name} must be None where eps is None (no norm)")
        if tuple(vector.shape) != (4 * C,):
            raise ValueError(f"{name} must be [{4 * C}], got {tuple(vector.shape)}")
        if vector.device != x.device:
            raise ValueError(f"{name} is on {vector.device} but x is on {x.device}")
    for name, dtype in (("x", x.dtype), ("out_dtype", out_dtype)):
        if dtype not in _FLOATS:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {dtype}")
    return choose_impl(
        impl,
        op,
        [
            *(why_not_triton(x.device, dtype) for dtype in (x.dtype, out_dtype)),
            f"{C} channels exceed {MAX_CHANNELS}" if C > MAX_CHANNELS else None,
            "the map has 2**32 tokens or more" if x.numel() // C >= 2**32 else None,
        ],
    )


def merge_neighbours(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    layer_norm_eps: float | None = None,
    offset: torch.Tensor | None = None,
    impl: Impl = "auto",
    config: OneShotConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Patch merging in one kernel: 2x2 gather, LayerNorm and projection; for few tokens.

    Args:
        x, layer_norm_eps, offset, impl: as in :func:`gather_neighbours`.
        weight: ``[N, 4C]`` in x's dtype.
        bias: ``[N]`` or None.
        config: tiles of the kernel; None takes the heuristic.
        pdl: as in :func:`gather_neighbours`; no kernel in flight may write a weight.

    Returns:
        ``[B, ceil(H/2), ceil(W/2), N]`` in x's dtype; products accumulate in fp32.

    Raises:
        ValueError: a shape does not fit; the message names the argument.
    """
    if x.ndim != 4:
        raise ValueError(f"x must be [B, H, W, C], got shape {tuple(x.shape)}")
    N, K = weight.shape
    if K != 4 * x.shape[3]:
        raise ValueError(f"weight must be [N, {4 * x.shape[3]}], got {tuple(weight.shape)}")
    for name, vector, size in (("bias", bias, N), ("offset", offset, K // 4)):
        if vector is not None and tuple(vector.shape) != (size,):
            raise ValueError(f"{name} must be [{size}], got {tuple(vector.shape)}")
    chosen = choose_impl(
        impl,
        "merge_neighbours",
        [
            why_not_triton(x.device, x.dtype),
            why_not_half(x.dtype),
            why_no_gradient(x, weight, bias, offset),
            why_no_one_shot(x.device) or merge_blocker(K // 4),
            f"weight is {weight.dtype}, x is {x.dtype}" if weight.dtype != x.dtype else None,
        ],
    )
    if chosen == "reference":
        rows = _gather_neighbours_ref(x, layer_norm_eps, offset, x.dtype)
        return F.linear(rows, weight, None if bias is None else bias.to(x.dtype))
    from fastswin.ops.linear.one_shot import one_shot_linear_fwd

    return one_shot_linear_fwd(
        x, weight, bias, None, layer_norm_eps, offset, None, None, config, pdl, gather=True
    )


def merge_blocker(channels: int) -> str | None:
    """Reason why one kernel cannot merge maps of so many channels, None where it can."""
    return one_shot_blocker(4 * channels) or one_shot_blocker(channels)


def _gather_neighbours_ref(
    x: torch.Tensor, eps: float | None, offset: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    if offset is not None or eps is not None:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
    if offset is not None:
        x = x + offset.to(x.dtype)
    y = _gather_ref(x)
    if eps is not None:
        y = F.layer_norm(y, (y.shape[3],), eps=eps)
    return y.to(dtype)


def _gather_layer_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    y = _gather_ref(x)
    return y.to(dtype) if eps is None else layer_norm_ref(y, weight, bias, eps, dtype)


def _token_marks_ref(x: torch.Tensor) -> torch.Tensor:
    """1 of every merged token of ``x [B, H, W, C]``, or NaN: fp32 ``[B, ceil(H/2), ceil(W/2)]``."""
    zeros = x.sum(dim=-1, keepdim=True, dtype=torch.float32).mul_(0.0)
    return _gather_ref(zeros).sum(dim=-1).add_(1.0)


def _gather_ref(x: torch.Tensor) -> torch.Tensor:
    _, H, W, _ = x.shape
    x = F.pad(x, (0, 0, 0, W % 2, 0, H % 2))
    return torch.cat((x[:, ::2, ::2], x[:, 1::2, ::2], x[:, ::2, 1::2], x[:, 1::2, 1::2]), dim=-1)
