"""Public masked softmax: validation and dispatch, nothing else.

All forms are one formula, ``softmax(scale * x + bias + mask)`` over the last axis, computed in
fp32 (fp64 for fp64) and stored in x's dtype. Autocast changes nothing here: what x is, y is.
"""

from __future__ import annotations

import torch

from fastswin._triton.available import Impl, choose_impl
from fastswin.ops.masked_softmax import register
from fastswin.ops.masked_softmax.autograd import MaskedSoftmaxInPlace
from fastswin.ops.masked_softmax.checks import (
    check_arguments,
    check_broadcast,
    check_in_place,
    check_mask_dtype,
    refuse_zero_one,
)
from fastswin.ops.masked_softmax.reference import masked_softmax_ref


def masked_softmax(
    x: torch.Tensor,
    *,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    seq_lens: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """``softmax(scale * x + bias + mask)`` over the last axis, in one pass over memory.

    Args:
        x: ``[..., N]`` scores, float16, bfloat16, float32 or float64, any strides.
        scale: factor on x, a Python number.
        bias: float tensor that broadcasts to x; added in fp32, read broadcast.
        mask: broadcasts to x. bool or uint8: non-zero hides the key exactly. Float: added in
            fp32 whatever its dtype; a finite fill such as -100 is an ordinary number.
        causal: x is ``[..., q, k]`` and query i sees keys 0..i (the diagonal starts top left).
        seq_lens: int32 or int64 ``[B]``, x is ``[B, ..., S, S]``: rows and keys from the
            length on are hidden. Lives on x's device or on the CPU.
        impl: "auto", "triton" or "reference".

    Returns:
        x's shape and dtype, contiguous. A row without visible keys, or whose visible scores are
        all -inf, is zeros and has a zero gradient. NaN at a visible key gives a NaN row.

    Raises:
        ValueError, TypeError: an argument is off; the message names it and the legal values.
            Values (0/1 float masks, lengths out of range) are not read while compiling or
            capturing a CUDA graph; lengths are clamped there.
        RuntimeError: ``impl="triton"`` cannot run here; the message says why.

    Source: PyTorch's softmax; hidden rows as in torch's scaled_dot_product_attention.
    """
    check_arguments(x, scale, bias, mask, causal, seq_lens)
    return _dispatch(x, float(scale), bias, mask, causal, seq_lens, impl)


def masked_softmax_(
    x: torch.Tensor,
    *,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    seq_lens: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """:func:`masked_softmax` written into ``x``, which is returned: no second score tensor.

    Args:
        x: ``[..., N]`` scores, overwritten. Must not overlap itself (no expanded axis).
        scale, bias, mask, causal, seq_lens, impl: as in :func:`masked_softmax`.

    Returns:
        ``x``. Its gradient flows; a leaf that requires a gradient is refused by autograd.

    Raises:
        ValueError, TypeError, RuntimeError: as in :func:`masked_softmax`; nothing is written then.
    """
    check_arguments(x, scale, bias, mask, causal, seq_lens)
    check_in_place(x)
    impl = _resolved(impl)
    lens = None if seq_lens is None else seq_lens.to(x.device).contiguous()
    tensors = [t for t in (x, bias, mask) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return MaskedSoftmaxInPlace.apply(x, bias, mask, lens, float(scale), causal, impl)
    register.masked_softmax_inplace(x, bias, mask, lens, float(scale), causal, impl)
    return x


def scaled_masked_softmax(
    x: torch.Tensor, mask: torch.Tensor | None, scale: float, *, impl: Impl = "auto"
) -> torch.Tensor:
    """``softmax(scale * x)`` with keys hidden where the mask is non-zero.

    Args:
        x: ``[batch, heads, q, k]`` scores, any q and k.
        mask: ``[batch or 1, heads or 1, q or 1, k]``, bool or uint8 (non-zero hides) or float
            (added); None hides nothing.
        scale: factor on x.
        impl: as in :func:`masked_softmax`.

    Returns:
        ``[batch, heads, q, k]`` in x's dtype; fully hidden rows are zeros.

    Raises:
        ValueError, TypeError, RuntimeError: as in :func:`masked_softmax`.
    """
    return masked_softmax(x, scale=scale, mask=mask, impl=impl)


def window_softmax(
    scores: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Softmax of Swin's window scores plus relative position bias plus shift mask.

    Args:
        scores: ``[B_, nH, N, N]`` with ``B_ = B * nW``, the window index fastest.
        bias: ``[nH, N, N]`` (or ``[1, nH, N, N]``) or None.
        mask: ``[nW, N, N]`` or None; window ``i`` uses ``mask[i % nW]``. bool or uint8 hides
            exactly, float (Swin's 0 / -100) is added.
        impl: as in :func:`masked_softmax`.

    Returns:
        ``[B_, nH, N, N]`` in the scores' dtype, contiguous. Gradients of scores, bias and a
        float mask; sums over windows are fp32, in a fixed order.

    Raises:
        ValueError, TypeError, RuntimeError: as in :func:`masked_softmax`.

    Source: Liu et al. 2021, WindowAttention.
    """
    shape = tuple(scores.shape)
    if scores.ndim != 4 or shape[2] != shape[3]:
        raise ValueError(f"scores must be [B_, nH, N, N], got {shape}")
    if bias is not None:
        if tuple(bias.shape) not in (shape[1:], (1, *shape[1:])):
            raise ValueError(
                f"bias must be [nH, N, N] = {list(shape[1:])} for scores of shape {shape}, "
                f"got {tuple(bias.shape)}"
            )
        bias = bias.reshape(shape[1:])
    if mask is None:
        return masked_softmax(scores, bias=bias, impl=impl)
    if mask.ndim != 3 or tuple(mask.shape[1:]) != shape[2:] or mask.shape[0] == 0:
        raise ValueError(
            f"mask must be [nW, {shape[2]}, {shape[3]}] for scores of shape {shape}, "
            f"got {tuple(mask.shape)}"
        )
    windows = mask.shape[0]
    if shape[0] % windows:
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} has nW={windows}, which does not divide the "
            f"{shape[0]} windows of scores {shape}"
        )
    check_mask_dtype(mask)
    check_broadcast("mask", mask[:, None], scores[:windows])
    refuse_zero_one(mask)
    per_image = scores.unflatten(0, (shape[0] // windows, windows))
    check_arguments(per_image, 1.0, bias, None, False, None)
    probs = _dispatch(per_image, 1.0, bias, mask[:, None], False, None, impl)
    return probs.flatten(0, 1)


def grouped_tril_softmax(
    x: torch.Tensor, seq_lens: torch.Tensor, *, impl: Impl = "auto"
) -> torch.Tensor:
    """Causal softmax of samples of different lengths; the mask is computed, never loaded.

    Args:
        x: ``[B, M, S, S]`` scores.
        seq_lens: ``[B]`` int32 or int64 lengths in ``[0, S]``, on x's device or the CPU.
        impl: as in :func:`masked_softmax`.

    Returns:
        ``[B, M, S, S]``: row ``i < seq_lens[b]`` is the softmax over keys 0..i, everything else
        is exactly 0. Dead tiles are neither read nor computed, here and in the backward.

    Raises:
        ValueError, TypeError, RuntimeError: as in :func:`masked_softmax`.
    """
    if x.ndim != 4:
        raise ValueError(f"x must be [B, M, S, S], got {tuple(x.shape)}")
    return masked_softmax(x, causal=True, seq_lens=seq_lens, impl=impl)


def _resolved(impl: Impl) -> Impl:
    choose_impl(impl, "masked_softmax", [None])  # refuses unknown words before anything runs
    return impl


def _dispatch(
    x: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    causal: bool,
    seq_lens: torch.Tensor | None,
    impl: Impl,
) -> torch.Tensor:
    if _resolved(impl) == "reference":
        return masked_softmax_ref(x, scale, bias, mask, causal, seq_lens)
    lens = None if seq_lens is None else seq_lens.to(x.device).contiguous()
    return register.masked_softmax_fwd(x, bias, mask, lens, scale, causal, impl)
