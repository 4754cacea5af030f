"""Autograd of the feed-forward layer: keeps x and the weights, and ``pre`` where a pass needs it.

    dh = dy fc2      dpre = dh * gelu'(pre)      dx = dpre fc1
    dfc2 = dy' gelu(pre)      dfc1 = dpre' x      db1 = sum over rows of dpre

Weights may be wider than x (fp32 under autocast): they are cast here, and their gradients come
back in their own dtype. Not differentiable twice: the second backward raises; ``impl="reference"``
is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from fastswin._triton.device import device_capability
from fastswin.ops.feed_forward import register
from fastswin.ops.feed_forward.config import default_forms
from fastswin.ops.feed_forward.register import KEEP_BOTH, KEEP_NOTHING, KEEP_PRE


class FeedForward(torch.autograd.Function):
    """``(x, fc1_weight, fc1_bias, fc2_weight, recompute) -> y`` in x's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        fc1_weight: torch.Tensor,
        fc1_bias: torch.Tensor | None,
        fc2_weight: torch.Tensor,
        recompute: bool,
    ) -> torch.Tensor:
        ctx.dtypes = [None if t is None else t.dtype for t in (fc1_weight, fc1_bias, fc2_weight)]
        fc1, fc2 = fc1_weight.to(x.dtype), fc2_weight.to(x.dtype)
        hidden, C = fc1.shape
        form, _ = default_forms(C, hidden, fc2.shape[0], x.dtype, device_capability(x.device))
        pre: torch.Tensor | None = None
        act: torch.Tensor | None = None
        if form == "fused" and recompute:
            y, _, _ = register.feed_forward_fwd(x, fc1, fc1_bias, fc2, KEEP_NOTHING)
        elif form != "epilogue":
            # plain operators, which torch.compile sees through
            pre = F.linear(x, fc1, None if fc1_bias is None else fc1_bias.to(x.dtype))
            act = F.gelu(pre)
            y = F.linear(act, fc2)
        else:
            keep = KEEP_PRE if recompute else KEEP_BOTH
            y, pre, act = register.feed_forward_fwd(x, fc1, fc1_bias, fc2, keep)
        ctx.save_for_backward(x, pre, None if recompute else act, fc1, fc1_bias, fc2)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple:
        x, pre, act, fc1, fc1_bias, fc2 = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:4])
        fc1_dtype, bias_dtype, fc2_dtype = ctx.dtypes
        dx, dfc1, dbias, dfc2 = register.feed_forward_bwd(
            dy, x, pre, act, fc1, fc1_bias, fc2, needs, fc1_dtype
        )
        return (
            dx if needs[0] else None,
            dfc1 if needs[1] else None,
            dbias.to(bias_dtype) if needs[2] else None,
            dfc2.to(fc2_dtype) if needs[3] else None,
            None,
        )
