"""Masked softmax as plain PyTorch: the definition that the kernels are tested against.

    y = softmax(scale * x + bias + mask)      over the last axis of x [..., N]

fp32 arithmetic (fp64 for fp64 inputs), one rounding at the end. The first function is
differentiable any number of times; the second is the gradient that the kernels compute,

    ds = y * (g - sum(g * y))     dx = scale * ds     dbias, dmask = ds summed to their shapes
"""

from __future__ import annotations

import math

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32."""
    return torch.promote_types(dtype, torch.float32)


def visible(
    x: torch.Tensor, mask: torch.Tensor | None, causal: bool, seq_lens: torch.Tensor | None
) -> torch.Tensor | None:
    """Where a key is not hidden exactly, broadcastable to ``x``; None where all are visible."""
    keep: torch.Tensor | None = None
    if mask is not None and not mask.dtype.is_floating_point:
        keep = mask == 0
    if not causal and seq_lens is None:
        return keep
    queries, keys = x.shape[-2:]
    query = torch.arange(queries, device=x.device)[:, None]
    key = torch.arange(keys, device=x.device)
    if causal:
        lower = key <= query
        keep = lower if keep is None else keep & lower
    if seq_lens is not None:
        length = seq_lens.to(x.device).reshape(-1, *[1] * (x.ndim - 1))
        inside = (query < length) & (key < length)
        keep = inside if keep is None else keep & inside
    return keep


def masked_softmax_ref(
    x: torch.Tensor,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x [..., N]`` to probabilities of the same shape and dtype; see the public function."""
    compute = compute_dtype(x.dtype)
    scores = x.to(compute) * scale
    if bias is not None:
        scores = scores + bias.to(compute)
    if mask is not None and mask.dtype.is_floating_point:
        scores = scores + mask.to(compute)
    keep = visible(x, mask, causal, seq_lens)
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    probs = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return probs.to(x.dtype, memory_format=torch.contiguous_format)


def masked_softmax_bwd_ref(
    grad: torch.Tensor,
    y: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, bias and float mask from the output; an empty tensor where not needed."""
    compute = compute_dtype(y.dtype)
    wide = y.to(compute)
    g = grad.to(compute)
    ds = wide * (g - (g * wide).sum(-1, keepdim=True))

    def summed(like: torch.Tensor | None, needed: bool) -> torch.Tensor:
        if not needed or like is None:
            return y.new_empty(0)
        return ds.sum_to_size(like.shape).to(like.dtype, copy=True).contiguous()

    dx = ds * scale if needs[0] else y.new_empty(0)
    return dx.to(y.dtype).contiguous(), summed(bias, needs[1]), summed(mask, needs[2])
