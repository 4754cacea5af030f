"""Gradients as the operators return them: in shape and dtype of their tensors, or empty."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fastswin.ops.window_attention.reference import MAX_LOGIT_SCALE

if TYPE_CHECKING:
    from fastswin.ops.window_attention.backward import Sums

Tensors2 = tuple[torch.Tensor, torch.Tensor]
Optional = torch.Tensor | None


def shared_gradients(
    sums: Sums, bias: Optional, logit_scale: Optional, like: torch.Tensor
) -> Tensors2:
    """dbias and dlogit_scale in the shape and dtype of their tensors."""
    dbias = dlogit_scale = like.new_empty(0)
    if sums.bias is not None and bias is not None:
        dbias = sums.bias.to(bias.dtype).contiguous()
    if sums.logit_scale is not None and logit_scale is not None:
        free = logit_scale <= MAX_LOGIT_SCALE  # the clamp passes no gradient above
        dlogit_scale = (sums.logit_scale.view(logit_scale.shape) * free).to(logit_scale.dtype)
    return dbias, dlogit_scale


def like_or_empty(like: torch.Tensor, t: Optional, needed: bool) -> torch.Tensor:
    """Memory for the gradient of ``t``; none where it is not needed or there is no ``t``."""
    if not needed or t is None:
        return like.new_empty(0)
    return torch.empty_like(t, memory_format=torch.contiguous_format)
