"""What the frameworks' blocks have in common: plain layers, dropout, drop path, dtypes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastswin import ops
from fastswin.accelerate.swap import Options
from fastswin.models.live.source import check_gelu

#: A branch ``[B, H, W, C]`` and the bias that still has to be added to it (None: it is in).
Branch = tuple[torch.Tensor, torch.Tensor | None]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of the module runs anybody's hooks."""
    return any(getattr(module, name, None) for name in _HOOKS)


def is_plain(module: Any, kind: type[nn.Module]) -> bool:
    """Whether a module computes exactly what ``kind`` does: no own or patched forward."""
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and "forward" not in module.__dict__
    )


def why_not_plain(kind: type[nn.Module], **layers: Any) -> str | None:
    """Reason against layers (by their names) that are not plain ``kind``."""
    for name, layer in layers.items():
        if not is_plain(layer, kind):
            return f"{name.replace('__', '.')} is a {type(layer).__name__}, not a {kind.__name__}"
    return None


def why_not_norm(**norms: Any) -> str | None:
    """Reason against norms that are not LayerNorm over the last axis."""
    for name, norm in norms.items():
        if not is_plain(norm, nn.LayerNorm) or len(norm.normalized_shape) != 1:
            return f"{name} is a {type(norm).__name__}, not a LayerNorm over channels"
    return None


def why_not_gelu(activation: object) -> str | None:
    """Reason against an activation that is not the exact GELU."""
    try:
        check_gelu(activation)
    except ValueError as error:
        return str(error)
    return None


def why_hooked(module: nn.Module) -> str | None:
    """Reason against a block whose inner modules have hooks, which a fused block would bypass."""
    for name, inner in module.named_modules():
        if name and is_hooked(inner):
            return f"{name} has hooks, which a fused block would not call"
    return None


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Autocast's dtype where it applies to ``x``, None where it is off (it leaves fp64 alone)."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def autocast_norm_dtype(x: torch.Tensor) -> torch.dtype:
    """What autocast makes of a LayerNorm's result: fp32 on a GPU, the input's dtype on a CPU."""
    return torch.promote_types(x.dtype, torch.float32) if x.is_cuda else x.dtype


def drops(dropout: nn.Module) -> bool:
    """Whether a dropout layer changes anything now."""
    return dropout.training and getattr(dropout, "p", 0.0) > 0.0


def drop_path_scale(
    drop_path: nn.Module, branch: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """The factor per image ``[B]`` that a drop-path layer would multiply with; None for none.

    The layer itself is asked, with ones: the same draws as in the original block, whatever the
    framework's way of drawing them.
    """
    rate = getattr(drop_path, "drop_prob", getattr(drop_path, "p", getattr(drop_path, "rate", 1.0)))
    if isinstance(drop_path, nn.Identity) or not drop_path.training or not rate:
        return None
    B = branch.shape[0]
    return drop_path(torch.ones(B, 1, 1, 1, dtype=dtype, device=branch.device)).flatten()


def project_qkv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The qkv projection for an attention called with ``qkv_bias=bias, sum_qkv_grad=True``."""
    return F.linear(x, weight, None if bias is None else bias.detach())


def project(layer: nn.Module, dropout: nn.Module, x: torch.Tensor) -> Branch:
    """A linear layer that leaves its bias to the residual add, unless dropout stands between."""
    if drops(dropout):
        return dropout(layer(x)), None
    assert isinstance(layer, nn.Linear)
    return F.linear(x, layer.weight), layer.bias


def feed_forward(fc1: nn.Module, fc2: nn.Module, x: torch.Tensor, options: Options) -> Branch:
    """``fc2(gelu(fc1(x)))`` without fc2's bias; ``x`` in the dtype of the products."""
    assert isinstance(fc1, nn.Linear)
    assert isinstance(fc2, nn.Linear)
    y = ops.feed_forward(
        x, fc1.weight, fc1.bias, fc2.weight, recompute=options.recompute_gelu, impl=options.impl
    )
    return y, fc2.bias
