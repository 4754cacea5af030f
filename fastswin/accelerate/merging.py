"""Patch merging over fused operators, whatever the framework.

    V1   reduction(LN(2x2 neighbours))        V2   LN(reduction(2x2 neighbours))

All frameworks join the four neighbours in the same order (columns outer, rows inner). As separate
operators the gather, the norm and the cast for the product are three passes over the map; here they
are one, and their backward is one. What a framework's mixin adds is its layout of tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from fastswin import ops
from fastswin.accelerate.block import check_stream
from fastswin.accelerate.parts import (
    autocast_dtype,
    autocast_norm_dtype,
    is_hooked,
    is_plain,
    why_hooked,
    why_not_norm,
    why_not_plain,
)
from fastswin.accelerate.swap import Fused


class FusedMerging(Fused):
    """Merging of any framework; subclasses say where the norm is and how tokens come in."""

    #: Whether the norm comes after the reduction (V2).
    POST_NORM: ClassVar[bool]

    @classmethod
    def _fastswin_blocker(cls, module: Any) -> str | None:
        if "forward" in module.__dict__:
            return "its forward is replaced on the instance"
        reason = why_not_plain(nn.Linear, reduction=module.reduction) or why_not_norm(
            norm=module.norm
        )
        if reason is not None:
            return reason
        rows, channels = module.reduction.in_features, module.reduction.out_features
        expected = (channels if cls.POST_NORM else rows,)
        if tuple(module.norm.normalized_shape) != expected or rows % 4:
            return f"norm covers {tuple(module.norm.normalized_shape)} channels, not {expected}"
        return why_hooked(module)

    def _fastswin_bypassed(self: Any) -> bool:
        """Whether the original forward must run: an inner module was hooked or replaced."""
        if torch.compiler.is_compiling():
            return False
        inner = (self.norm, self.reduction)
        return any(map(is_hooked, inner)) or not is_plain(self.reduction, nn.Linear)

    def _fastswin_merge(self: Any, x: torch.Tensor) -> torch.Tensor:
        """A map ``[B, H, W, C]`` to ``[B, ceil(H/2), ceil(W/2), 2C]``."""
        check_stream(x, self.reduction.in_features // 4, "[B, H, W, C]")
        options, norm = self._fastswin, self.norm
        half = autocast_dtype(x)
        rows_dtype = half or x.dtype
        if not self.POST_NORM and self.reduction.bias is None:
            return ops.gather_layer_norm_linear(
                x, norm.weight, norm.bias, self.reduction.weight, eps=norm.eps,
                out_dtype=rows_dtype, impl=options.impl,
            )  # fmt: skip
        if not self.POST_NORM:
            return self.reduction(
                ops.gather_layer_norm(
                    x, norm.weight, norm.bias, eps=norm.eps, out_dtype=rows_dtype,
                    impl=options.impl,
                )
            )  # fmt: skip
        y = self.reduction(
            ops.gather_layer_norm(x, eps=None, out_dtype=rows_dtype, impl=options.impl)
        )
        norm_dtype = y.dtype
        if half is not None:
            norm_dtype = options.residual_dtype or autocast_norm_dtype(y)
        return ops.add_layer_norm(
            y, norm.weight, norm.bias, eps=norm.eps, norm_dtype=norm_dtype, impl=options.impl
        )[1]


class MapMerging(FusedMerging):
    """Takes and gives maps ``[B, H, W, C]``: ours, timm's and torchvision's."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.ndim != 4 or self._fastswin_bypassed():  # torchvision takes any leading axes
            return self._fastswin_own_forward(x)
        return self._fastswin_merge(x)


class MapMergingV1(MapMerging):
    """Norm first."""

    POST_NORM = False


class MapMergingV2(MapMerging):
    """Norm last."""

    POST_NORM = True


class TokenMerging(FusedMerging):
    """Takes and gives tokens ``[B, H * W, C]`` with the map's size beside them: transformers'."""

    def forward(
        self: Any, input_feature: torch.Tensor, input_dimensions: tuple[int, int]
    ) -> torch.Tensor:
        H, W = input_dimensions
        if self._fastswin_bypassed() or input_feature.shape[1:2] != (H * W,):
            return self._fastswin_own_forward(input_feature, input_dimensions)
        return self._fastswin_merge(
            input_feature.reshape(-1, H, W, input_feature.shape[2])
        ).flatten(1, 2)


class TokenMergingV1(TokenMerging):
    """Norm first."""

    POST_NORM = False


class TokenMergingV2(TokenMerging):
    """Norm last."""

    POST_NORM = True
