"""Schema, fake kernel and dispatch of the feed-forward layer's backward; imports no Triton.

An output that ``needs`` does not ask for is an empty tensor of no elements.
"""

from __future__ import annotations

import torch

Tensors4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

torch.library.define(
    "fastswin::feed_forward_bwd",
    "(Tensor dy, Tensor x, Tensor a, Tensor? h, Tensor fc1_weight, Tensor fc2_weight, "
    "bool[4] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("fastswin::feed_forward_bwd", "default")
def _bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    h: torch.Tensor | None,
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    needs: list[bool],
) -> Tensors4:
    from fastswin.ops.feed_forward.backward import feed_forward_bwd

    # a backward called inside autocast must not change the dtype of its matrix products
    with torch.autocast(x.device.type, enabled=False):
        return feed_forward_bwd(dy, x, a, h, fc1_weight, fc2_weight, needs)


@torch.library.register_fake("fastswin::feed_forward_bwd")
def _bwd_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    h: torch.Tensor | None,
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    needs: list[bool],
) -> Tensors4:
    shapes = (x.shape, fc1_weight.shape, fc1_weight.shape[:1], fc2_weight.shape)
    dx, dw1, db1, dw2 = (
        x.new_empty(shape if need else (0,)) for shape, need in zip(shapes, needs, strict=True)
    )
    return dx, dw1, db1, dw2


feed_forward_bwd = torch.ops.fastswin.feed_forward_bwd
