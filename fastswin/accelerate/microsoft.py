"""Blocks in the style of microsoft/Swin-Transformer, recognised by their attributes.

That code is copied into many repositories under many names, so a block is told by what it has
(``norm1, attn, norm2, mlp, window_size, shift_size, input_resolution``), a merging by ``reduction,
norm, input_resolution``, and then asked: on random tokens the fused module must give what the
module itself gives, else it is left alone.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from fastswin.accelerate.block import check_stream
from fastswin.accelerate.merging import FusedMerging
from fastswin.accelerate.official_names import OfficialBlock
from fastswin.accelerate.swap import Fused, Options, fuse, unfuse
from fastswin.models.live.source import pair

#: Largest difference of the two answers over the largest answer, by dtype.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class _Block(OfficialBlock):
    @staticmethod
    def _fastswin_layers_blocker(block: Any) -> str | None:
        if hasattr(block, "norm3"):
            return "it has a third norm"
        return (
            _why_other_arguments(block)
            or OfficialBlock._fastswin_layers_blocker(block)
            or _why_other_answer(
                block, _kind(block), block.norm1.weight, block.norm1.weight.numel()
            )
        )

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        check_stream(x, self.attn.qkv.in_features, "[B, H * W, C]")
        if self._fastswin_bypassed():
            return self._fastswin_own_forward(x)
        H, W = pair(self.input_resolution)
        if x.shape[1] != H * W:
            raise ValueError(f"x must be [B, {H} * {W}, C], got shape {tuple(x.shape)}")
        out = self._fastswin_forward(x.reshape(-1, H, W, x.shape[2]), pair(self.shift_size))
        return out.reshape(x.shape)


class BlockV1(_Block):
    """Norm first."""

    POST_NORM = False


class BlockV2(_Block):
    """Norm last."""

    POST_NORM = True


class _Merging(FusedMerging):
    @classmethod
    def _fastswin_blocker(cls, module: Any) -> str | None:
        reason = _why_other_arguments(module) or super()._fastswin_blocker(module)
        if reason is not None:
            return reason
        weight = module.reduction.weight
        return _why_other_answer(module, cls, weight, weight.shape[1] // 4)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        H, W = pair(self.input_resolution)
        whole = x.ndim == 3 and x.shape[1] == H * W and H % 2 == 0 and W % 2 == 0
        if not whole or self._fastswin_bypassed():
            return self._fastswin_own_forward(x)
        return self._fastswin_merge(x.reshape(-1, H, W, x.shape[2])).flatten(1, 2)


class MergingV1(_Merging):
    """Norm first."""

    POST_NORM = False


class MergingV2(_Merging):
    """Norm last."""

    POST_NORM = True


def block_mixin(name: str, module: Any) -> type[Fused] | None:
    """The mixin of a block, by its attributes."""
    wanted = ("norm1", "attn", "norm2", "mlp", "window_size", "shift_size", "input_resolution")
    attn = getattr(module, "attn", None)
    tables = ("relative_position_bias_table", "cpb_mlp")
    if not all(hasattr(module, n) for n in wanted) or not any(hasattr(attn, t) for t in tables):
        return None
    if not all(hasattr(attn, n) for n in ("qkv", "proj", "num_heads", "window_size")):
        return None
    return _kind(module)


def _kind(block: Any) -> type[_Block]:
    return BlockV2 if hasattr(block.attn, "logit_scale") else BlockV1


def merging_mixin(name: str, module: Any) -> type[Fused] | None:
    """The mixin of a patch merging, by its attributes; V2's norm covers the reduced channels."""
    if not all(hasattr(module, n) for n in ("reduction", "norm", "input_resolution")):
        return None
    channels = getattr(module.norm, "normalized_shape", (0,))[0]
    return MergingV1 if channels == getattr(module.reduction, "in_features", -1) else MergingV2


def patch_conv(name: str, module: Any) -> nn.Module | None:
    """The patch convolution of an embedding module, by its attributes."""
    return getattr(module, "proj", None) if hasattr(module, "patches_resolution") else None


def _why_other_arguments(module: Any) -> str | None:
    """Reason against a module that takes more than tokens."""
    names = [p.name for p in inspect.signature(type(module).forward).parameters.values()]
    if len(names) == 2:
        return None
    return f"its forward takes {', '.join(names[1:])}, not tokens [B, H * W, C] alone"


def _why_other_answer(
    module: Any, mixin: type[Fused], weight: torch.Tensor, channels: int
) -> str | None:
    """Reason against a module whose own answer differs from the fused one's; it stays as it was."""
    if weight.is_meta:
        return "its weights are on the meta device, so its answer cannot be compared"
    H, W = pair(module.input_resolution)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, H * W, channels, generator=generator).to(weight.device, weight.dtype)
    modes = [(inner, inner.training) for inner in module.modules()]
    try:
        module.eval()
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            own = module(x)
            fuse(module, mixin, Options(impl="reference"))
            try:
                fused = module(x)
            finally:
                unfuse(module)
    except Exception as error:  # whatever a stranger's module raises on plain tokens
        return f"it could not be tried on random tokens: {type(error).__name__}: {error}"
    finally:
        for inner, training in modes:
            inner.training = training
    if not isinstance(own, torch.Tensor) or own.shape != fused.shape:
        return "its forward does not return tokens [B, H * W, C]"
    difference = (own - fused).abs().max() / own.abs().max()
    if not difference <= TOLERANCE.get(weight.dtype, 1e-3):
        kind = "patch merging" if issubclass(mixin, FusedMerging) else "Swin block"
        return f"its answer differs from a {kind}'s by {float(difference):.1e} of the largest"
    return None
