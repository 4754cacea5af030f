"""Autograd of the feed-forward layer: keeps x, the pre-activation and the weights.

    dh = dy fc2      da = dh * gelu'(a)      dx = da fc1
    dfc2 = dy' gelu(a)      dfc1 = da' x      db1 = sum over rows of da

Not differentiable twice: the second backward raises; ``impl="reference"`` is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from fastswin.ops.feed_forward import register


class FeedForward(torch.autograd.Function):
    """``(x, fc1_weight, fc1_bias, fc2_weight, recompute) -> y``, all in one dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        fc1_weight: torch.Tensor,
        fc1_bias: torch.Tensor | None,
        fc2_weight: torch.Tensor,
        recompute: bool,
    ) -> torch.Tensor:
        a = F.linear(x, fc1_weight, fc1_bias)
        h = F.gelu(a)
        ctx.save_for_backward(x, a, None if recompute else h, fc1_weight, fc2_weight)
        return F.linear(h, fc2_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple:
        x, a, h, fc1_weight, fc2_weight = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:4])
        grads = register.feed_forward_bwd(dy, x, a, h, fc1_weight, fc2_weight, needs)
        return *(g if need else None for g, need in zip(grads, needs, strict=True)), None
