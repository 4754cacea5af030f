"""Schemas, fake kernels and dispatch of the feed-forward layer; imports no Triton.

``keep`` says what the forward leaves for the backward. An output that is not asked for is an empty
tensor of no elements. Gradients: autograd.py.
"""

from __future__ import annotations

import torch

#: Values of ``keep``: nothing but the inputs (the fused form), ``pre``, or ``pre`` and ``act``.
KEEP_NOTHING, KEEP_PRE, KEEP_BOTH = 0, 1, 2

Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Tensors4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_TAGS = (torch.Tag.pt2_compliant_tag,)

torch.library.define(
    "fastswin::feed_forward_fwd",
    "(Tensor x, Tensor fc1_weight, Tensor? fc1_bias, Tensor fc2_weight, int keep) "
    "-> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "fastswin::feed_forward_bwd",
    "(Tensor dy, Tensor x, Tensor? pre, Tensor? act, Tensor fc1_weight, Tensor? fc1_bias, "
    "Tensor fc2_weight, bool[4] needs, ScalarType weight_dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


@torch.library.impl("fastswin::feed_forward_fwd", "default")
def _fwd(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor,
    keep: int,
) -> Tensors3:
    from fastswin.ops.feed_forward.forward import feed_forward_fwd

    # inside autocast the products keep the dtype of x
    with torch.autocast(x.device.type, enabled=False):
        return feed_forward_fwd(x, fc1_weight, fc1_bias, fc2_weight, keep)


@torch.library.register_fake("fastswin::feed_forward_fwd")
def _fwd_fake(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor,
    keep: int,
) -> Tensors3:
    hidden = (*x.shape[:-1], fc1_weight.shape[0])
    return (
        x.new_empty((*x.shape[:-1], fc2_weight.shape[0])),
        x.new_empty(hidden if keep != KEEP_NOTHING else (0,)),
        x.new_empty(hidden if keep == KEEP_BOTH else (0,)),
    )


@torch.library.impl("fastswin::feed_forward_bwd", "default")
def _bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    pre: torch.Tensor | None,
    act: torch.Tensor | None,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor,
    needs: list[bool],
    weight_dtype: torch.dtype,
) -> Tensors4:
    from fastswin.ops.feed_forward.backward import feed_forward_bwd

    # a backward called inside autocast must not change the dtype of its matrix products
    with torch.autocast(x.device.type, enabled=False):
        return feed_forward_bwd(
            dy, x, pre, act, fc1_weight, fc1_bias, fc2_weight, needs, weight_dtype
        )


@torch.library.register_fake("fastswin::feed_forward_bwd")
def _bwd_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    pre: torch.Tensor | None,
    act: torch.Tensor | None,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor,
    needs: list[bool],
    weight_dtype: torch.dtype,
) -> Tensors4:
    need_x, need_w1, need_b1, need_w2 = needs
    return (
        x.new_empty(x.shape if need_x else (0,)),
        x.new_empty(fc1_weight.shape if need_w1 else (0,), dtype=weight_dtype),
        x.new_empty(fc1_weight.shape[:1] if need_b1 else (0,), dtype=torch.float32),
        x.new_empty(fc2_weight.shape if need_w2 else (0,), dtype=weight_dtype),
    )


feed_forward_fwd = torch.ops.fastswin.feed_forward_fwd
feed_forward_bwd = torch.ops.fastswin.feed_forward_bwd
