"""Autograd of the masked-softmax operators: which tensors are kept, and both derivatives.

Only the output ``y`` is kept (and a bias or mask only where its own gradient is asked for). The
backward operator is itself differentiable, in plain PyTorch: with ``G`` the cotangent of ``ds``,

    d/dg = y * (G - sum(G * y))         d/dy = G * (g - sum(g * y)) - g * sum(G * y)

and ``y`` leads on to x, bias and mask through the forward operator's own node.
"""

from __future__ import annotations

from typing import Any

import torch

from fastswin.ops.masked_softmax.reference import compute_dtype


def _forward_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    _, bias, mask, seq_lens, scale, causal, impl = inputs
    needs = ctx.needs_input_grad
    ctx.needs = [
        needs[0],
        bias is not None and needs[1],
        mask is not None and mask.dtype.is_floating_point and needs[2],
    ]
    ctx.save_for_backward(
        output, bias if ctx.needs[1] else None, mask if ctx.needs[2] else None, seq_lens
    )
    ctx.scale, ctx.causal, ctx.impl = scale, causal, impl


def _forward_gradient(ctx: Any, grad: torch.Tensor) -> tuple:
    y, bias, mask, seq_lens = ctx.saved_tensors
    dx, dbias, dmask = torch.ops.fastswin.masked_softmax_bwd(
        grad, y, bias, mask, seq_lens, ctx.scale, ctx.causal, ctx.needs, ctx.impl
    )
    needs = ctx.needs
    return (
        dx if needs[0] else None,
        dbias if needs[1] else None,
        dmask if needs[2] else None,
        None,
        None,
        None,
        None,
    )


def _backward_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    grad, y, bias, mask, _, scale, _, needs, _ = inputs
    ctx.save_for_backward(grad, y)
    ctx.scale, ctx.needs = scale, needs
    ctx.shapes = [None if t is None else t.shape for t in (bias, mask)]


def _backward_gradient(
    ctx: Any, g_dx: torch.Tensor, g_dbias: torch.Tensor, g_dmask: torch.Tensor
) -> tuple:
    grad, y = ctx.saved_tensors
    compute = compute_dtype(y.dtype)
    g, p = grad.to(compute), y.to(compute)
    cotangent = torch.zeros((), dtype=compute, device=y.device)
    if ctx.needs[0] and g_dx is not None:
        cotangent = cotangent + ctx.scale * g_dx.to(compute)
    if ctx.needs[1] and g_dbias is not None:
        cotangent = cotangent + g_dbias.to(compute)
    if ctx.needs[2] and g_dmask is not None:
        cotangent = cotangent + g_dmask.to(compute)
    inner = (cotangent * p).sum(-1, keepdim=True)
    d_grad = p * (cotangent - inner)
    d_y = cotangent * (g - (g * p).sum(-1, keepdim=True)) - g * inner
    return d_grad.to(grad.dtype), d_y.to(y.dtype), *[None] * 7


def register_gradients() -> None:
    """Attach the formulas to the registered operators."""
    torch.library.register_autograd(
        "fastswin::masked_softmax_fwd", _forward_gradient, setup_context=_forward_context
    )
    torch.library.register_autograd(
        "fastswin::masked_softmax_bwd", _backward_gradient, setup_context=_backward_context
    )


class MaskedSoftmaxInPlace(torch.autograd.Function):
    """The in-place form under autograd: ``x`` is marked as modified and serves as the output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *operands: Any) -> torch.Tensor:
        torch.ops.fastswin.masked_softmax_inplace(x, *operands)
        ctx.mark_dirty(x)
        _forward_context(ctx, (x, *operands), x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return _forward_gradient(ctx, grad)
