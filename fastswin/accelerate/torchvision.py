"""torchvision's ``SwinTransformer``, V1 and V2."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastswin import ops
from fastswin.accelerate.block import FusedBlock, Modules, Pair, check_stream
from fastswin.accelerate.merging import MapMergingV1, MapMergingV2
from fastswin.accelerate.official_names import NO_DROPOUT
from fastswin.accelerate.parts import (
    Branch,
    drops,
    feed_forward,
    project,
    project_qkv,
    why_not_gelu,
    why_not_norm,
    why_not_plain,
)
from fastswin.accelerate.swap import Fused, Options
from fastswin.models.live.source import pair

_MODULE = "torchvision.models.swin_transformer."


class _Block(FusedBlock):
    @staticmethod
    def _fastswin_layers_blocker(block: Any) -> str | None:
        attn, mlp = block.attn, block.mlp
        suffix = "V2" if hasattr(attn, "logit_scale") else ""
        expected = _MODULE + "ShiftedWindowAttention" + suffix
        if f"{type(attn).__module__}.{type(attn).__qualname__}" != expected:
            return f"attn is a {type(attn).__name__}, not torchvision's own"
        if len(mlp) != 5:
            return f"mlp has {len(mlp)} layers, not linear, GELU, dropout, linear, dropout"
        return (
            why_not_norm(norm1=block.norm1, norm2=block.norm2)
            or why_not_plain(
                nn.Linear, attn__qkv=attn.qkv, attn__proj=attn.proj, mlp__0=mlp[0], mlp__3=mlp[3]
            )
            or why_not_gelu(mlp[1])
        )

    def _fastswin_norms(self: Any) -> tuple[Any, Any]:
        return self.norm1, self.norm2

    def _fastswin_drop_paths(self: Any) -> tuple[nn.Module, nn.Module]:
        return self.stochastic_depth, self.stochastic_depth

    def _fastswin_linears(self: Any) -> Modules:
        return self.attn.qkv, self.attn.proj, self.mlp[0], self.mlp[3]

    def _fastswin_attend(self: Any, x: torch.Tensor, shift_size: Pair) -> Branch:
        attn = self.attn
        cosine = hasattr(attn, "logit_scale")
        qkv_bias = attn.qkv.bias
        if cosine and qkv_bias is not None:  # one bias of 3C, whose key part has no effect
            q, k, v = qkv_bias.chunk(3)
            qkv_bias = torch.cat((q, torch.zeros_like(k), v))
        out = ops.window_attention(
            project_qkv(x, attn.qkv.weight, qkv_bias),
            num_heads=attn.num_heads,
            window_size=pair(attn.window_size),
            shift_size=shift_size,
            qkv_bias=qkv_bias,
            sum_qkv_grad=True,
            dropout_p=attn.attention_dropout if attn.training else 0.0,
            impl=self._fastswin.impl,
            **(_cosine_position(attn) if cosine else {"bias_table": _table(attn)}),
        )
        if attn.training and attn.dropout > 0.0:
            return F.dropout(attn.proj(out), attn.dropout), None
        return project(attn.proj, NO_DROPOUT, out)

    def _fastswin_mlp(self: Any, x: torch.Tensor, options: Options) -> Branch:
        if drops(self.mlp[2]) or drops(self.mlp[4]):
            return self.mlp(x), None
        return feed_forward(self.mlp[0], self.mlp[3], x, options)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        check_stream(x, self.attn.qkv.in_features, "[B, H, W, C]")
        if self._fastswin_bypassed():
            return self._fastswin_own_forward(x)
        window, shift = pair(self.attn.window_size), pair(self.attn.shift_size)
        shift = (
            0 if window[0] >= x.shape[1] else shift[0],  # one window covers the axis
            0 if window[1] >= x.shape[2] else shift[1],
        )
        return self._fastswin_forward(x, shift)


def _table(attn: Any) -> torch.Tensor:
    return attn.relative_position_bias_table


def _cosine_position(attn: Any) -> dict[str, Any]:
    table = attn.cpb_mlp(attn.relative_coords_table).view(-1, attn.num_heads)
    return {"logit_scale": attn.logit_scale, "bias_table": 16 * torch.sigmoid(table)}


class BlockV1(_Block):
    """torchvision's SwinTransformerBlock."""

    POST_NORM = False


class BlockV2(_Block):
    """torchvision's SwinTransformerBlockV2."""

    POST_NORM = True


_BLOCKS: dict[str, type[Fused]] = {
    _MODULE + "SwinTransformerBlock": BlockV1,
    _MODULE + "SwinTransformerBlockV2": BlockV2,
}


_MERGINGS: dict[str, type[Fused]] = {
    _MODULE + "PatchMerging": MapMergingV1,
    _MODULE + "PatchMergingV2": MapMergingV2,
}


def block_mixin(name: str, module: Any) -> type[Fused] | None:
    """The mixin of a block, by the full name of its class."""
    return _BLOCKS.get(name)


def merging_mixin(name: str, module: Any) -> type[Fused] | None:
    """The mixin of a patch merging, by the full name of its class."""
    return _MERGINGS.get(name)


def patch_conv(name: str, module: Any) -> nn.Module | None:
    """The patch convolution, by the full name of the model's class."""
    return module.features[0][0] if name == _MODULE + "SwinTransformer" else None
