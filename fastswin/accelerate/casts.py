"""Casts of all weights in one pass, for captured steps under autocast.

Autocast casts each weight where a product reads it, and each gradient where it comes out: on
Swin-T some 120 launches of microseconds for 170 MB each way. Here the weights whose products are
known to run in autocast's dtype (those of fused modules) are cast together before the model runs,
and their gradients together after. The numbers are the same: parameters and their gradients stay
fp32; a weight that is used twice sums its gradients in half precision, as with autocast's cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from fastswin.accelerate.block import FusedBlock
from fastswin.accelerate.layers import FusedPatchConv
from fastswin.accelerate.merging import FusedMerging


def product_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """fp32 weights of the model that fused modules multiply with in autocast's dtype, by name."""
    wanted: set[int] = set()
    for module in model.modules():
        layers: tuple[Any, ...] = ()
        if isinstance(module, FusedBlock):
            layers = module._fastswin_linears()
        elif isinstance(module, FusedMerging):
            layers = (module.reduction,)
        elif isinstance(module, FusedPatchConv):
            layers = (module,)
        wanted.update(id(layer.weight) for layer in layers)
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in wanted and parameter.dtype == torch.float32
    }


class CastTogether(torch.autograd.Function):
    """``(dtype, *weights) -> weights in dtype``; gradients come back in fp32."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        cast = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        torch._foreach_copy_(cast, list(weights))
        return tuple(cast)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        found = [g for g in gradients if g is not None]
        wide = [torch.empty_like(g, dtype=torch.float32) for g in found]
        if found:
            torch._foreach_copy_(wide, found)
        cast = iter(wide)
        return None, *(None if g is None else next(cast) for g in gradients)


def call_with_cast_weights(
    model: nn.Module, dtype: torch.dtype, images: torch.Tensor
) -> torch.Tensor:
    """The model's answer inside autocast to ``dtype``, its products' weights cast beforehand."""
    weights = product_weights(model)
    if not weights:
        return model(images)
    cast = CastTogether.apply(dtype, *weights.values())
    return functional_call(model, dict(zip(weights, cast, strict=True)), (images,))
