"""Autograd of window attention: what is kept for the backward, and the backward of the backward.

Kept: the inputs (qkv, bias, logit_scale, qkv_bias), the seed of the dropout and, where the backward
works in tiles, the output and two numbers of each row. No scores, no mask, no windows.

The backward operators are differentiable through the reference: their gradient is that of
``autograd.grad(reference(...), inputs, grad)`` in plain PyTorch, to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastswin.ops.window_attention.geometry import expand_bias_table
from fastswin.ops.window_attention.reference import (
    window_attention_partitioned_ref,
    window_attention_ref,
)

Optional = torch.Tensor | None


def _keep(ctx: Any, inputs: Sequence[Optional], output: tuple, needs: list[bool]) -> None:
    out, row_stats = output
    ctx.mark_non_differentiable(row_stats)
    ctx.set_materialize_grads(False)
    ctx.needs = needs
    tiled = row_stats.numel() > 0
    ctx.save_for_backward(*inputs, out if tiled else None, row_stats if tiled else None)


def _chosen(gradients: Sequence[torch.Tensor], needs: Sequence[bool]) -> list[Optional]:
    return [g if needed else None for g, needed in zip(gradients, needs, strict=True)]


def _image_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    qkv, bias, logit_scale, qkv_bias, seed = inputs[:5]
    ctx.options = inputs[5:12]
    needs = [t is not None and n for t, n in zip(inputs[:4], ctx.needs_input_grad, strict=False)]
    _keep(ctx, (qkv, bias, logit_scale, qkv_bias, seed), output, needs)


def _image_gradient(ctx: Any, grad: Optional, _: Optional) -> tuple:
    if grad is None:
        return (None,) * 14
    qkv, bias, logit_scale, qkv_bias, seed, out, row_stats = ctx.saved_tensors
    found = torch.ops.fastswin.window_attention_bwd(
        grad, qkv, out, row_stats, bias, logit_scale, qkv_bias, seed, *ctx.options, ctx.needs
    )
    return (*_chosen(found, ctx.needs), *(None,) * 10)


def _partitioned_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, bias, mask, logit_scale, seed = inputs[:7]
    ctx.options = inputs[7:10]
    wanted = ctx.needs_input_grad
    needs = [
        wanted[0], wanted[1], wanted[2], bias is not None and wanted[3],
        logit_scale is not None and wanted[5],
    ]  # fmt: skip
    _keep(ctx, (q, k, v, bias, mask, logit_scale, seed), output, needs)


def _partitioned_gradient(ctx: Any, grad: Optional, _: Optional) -> tuple:
    if grad is None:
        return (None,) * 12
    q, k, v, bias, mask, logit_scale, seed, out, row_stats = ctx.saved_tensors
    found = torch.ops.fastswin.window_attention_partitioned_bwd(
        grad, q, k, v, out, row_stats, bias, mask, logit_scale, seed, *ctx.options, ctx.needs
    )
    dq, dk, dv, dbias, dlogit_scale = _chosen(found, ctx.needs)
    return dq, dk, dv, dbias, None, dlogit_scale, *(None,) * 6


def _second_order(
    forward: Callable[..., torch.Tensor],
    grad: torch.Tensor,
    tensors: Sequence[Optional],
    needs: Sequence[bool],
    cotangents: Sequence[Optional],
) -> list[Optional]:
    """Gradients, with respect to ``grad`` and ``tensors``, of the backward of ``forward``."""
    again = torch.is_grad_enabled()  # somebody will differentiate this, too

    def leaf(t: Optional) -> Optional:
        if t is None or (again and t.requires_grad):
            return t
        return t.detach().requires_grad_()

    with torch.enable_grad():
        upstream, leaves = leaf(grad), [leaf(t) for t in tensors]
        wanted = [t for t, n in zip(leaves, needs, strict=True) if n and t is not None]
        first = torch.autograd.grad(
            forward(*leaves), wanted, upstream, create_graph=True, allow_unused=True
        )
        given = [c for c, needed in zip(cotangents, needs, strict=True) if needed]
        pairs = [
            (g, c)
            for g, c in zip(first, given, strict=True)
            if g is not None and g.requires_grad and c is not None
        ]
        present = [t for t in (upstream, *leaves) if t is not None]
        if not pairs:
            return [None] * (1 + len(leaves))
        second = iter(
            torch.autograd.grad(
                [g for g, _ in pairs], present, [c for _, c in pairs],
                create_graph=again, allow_unused=True,
            )
        )  # fmt: skip
    return [None if t is None else next(second) for t in (upstream, *leaves)]


def _image_bwd_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    grad, qkv, _, _, bias, logit_scale, qkv_bias, seed = inputs[:8]
    ctx.options, ctx.needs = inputs[8:15], inputs[15]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad, qkv, bias, logit_scale, qkv_bias, seed)


def _image_bwd_gradient(ctx: Any, *cotangents: Optional) -> tuple:
    grad, *tensors, seed = ctx.saved_tensors
    scale, heads, window, shift, _, dropout_p, sum_qkv_grad = ctx.options

    def forward(
        qkv: torch.Tensor, bias: Optional, logit_scale: Optional, qkv_bias: Optional
    ) -> torch.Tensor:
        if bias is not None and bias.ndim == 2:
            bias = expand_bias_table(bias, tuple(window))
        return window_attention_ref(
            qkv, bias, heads, tuple(window), tuple(shift), scale, logit_scale, qkv_bias,
            dropout_p, seed, sum_qkv_grad,
        )  # fmt: skip

    d_grad, *rest = _second_order(forward, grad, tensors, ctx.needs, cotangents)
    return d_grad, rest[0], None, None, *rest[1:], *(None,) * 9


def _partitioned_bwd_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    grad, q, k, v, _, _, bias, mask, logit_scale, seed = inputs[:10]
    ctx.options, ctx.needs = inputs[10:13], inputs[13]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad, q, k, v, bias, logit_scale, mask, seed)


def _partitioned_bwd_gradient(ctx: Any, *cotangents: Optional) -> tuple:
    grad, *tensors, mask, seed = ctx.saved_tensors
    scale, _, dropout_p = ctx.options

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Optional, logit_scale: Optional
    ) -> torch.Tensor:
        return window_attention_partitioned_ref(
            q, k, v, bias, mask, scale, logit_scale, dropout_p, seed
        )

    found = _second_order(forward, grad, tensors, ctx.needs, cotangents)
    d_grad, dq, dk, dv, dbias, dlogit_scale = found
    return d_grad, dq, dk, dv, None, None, dbias, None, dlogit_scale, *(None,) * 6


def register_gradients() -> None:
    """Attach the formulas to the registered operators."""
    for name, gradient, context in (
        ("window_attention", _image_gradient, _image_context),
        ("window_attention_bwd", _image_bwd_gradient, _image_bwd_context),
        ("window_attention_partitioned", _partitioned_gradient, _partitioned_context),
        ("window_attention_partitioned_bwd", _partitioned_bwd_gradient, _partitioned_bwd_context),
    ):
        torch.library.register_autograd(f"fastswin::{name}", gradient, setup_context=context)
