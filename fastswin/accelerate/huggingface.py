"""transformers' ``SwinLayer`` and ``Swinv2Layer``.

Queries, keys and values are three layers; their weights are joined on every call, so each keeps its
own parameter and gradient. V1 has no drop path on its MLP half. V2 adds the shift mask twice (-200
instead of -100), which differs only for scores further than 100 apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastswin import ops
from fastswin.accelerate.block import FusedBlock, Modules, Pair, check_stream
from fastswin.accelerate.merging import TokenMergingV1, TokenMergingV2
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

_V1 = "transformers.models.swin.modeling_swin.Swin"
_V2 = "transformers.models.swinv2.modeling_swinv2.Swinv2"


def _joined(*layers: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of several projections as one; a missing bias counts as zeros."""
    weight = torch.cat([layer.weight for layer in layers])
    if all(layer.bias is None for layer in layers):
        return weight, None
    biases = [
        layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias
        for layer in layers
    ]
    return weight, torch.cat(biases)


class _Block(FusedBlock):
    def _fastswin_norms(self: Any) -> tuple[Any, Any]:
        return self.layernorm_before, self.layernorm_after

    def _fastswin_map(self: Any, x: torch.Tensor, size: Pair) -> torch.Tensor:
        """Tokens ``[B, H * W, C]`` through the block."""
        H, W = pair(size)
        B, _, C = x.shape
        shift = int(self.shift_size)
        x = self._fastswin_forward(x.reshape(B, H, W, C), (shift, shift) if shift > 0 else (0, 0))
        return x.reshape(B, H * W, C)

    def _fastswin_channels(self: Any) -> int:
        return self.layernorm_before.normalized_shape[0]


class BlockV1(_Block):
    """transformers' SwinLayer."""

    POST_NORM = False

    @staticmethod
    def _fastswin_layers_blocker(block: Any) -> str | None:
        attn, mlp = block.attention, getattr(block, "mlp", None)
        if not hasattr(attn, "q_proj") or mlp is None:
            return "this release of transformers has another layout of SwinLayer"
        return (
            why_not_norm(
                layernorm_before=block.layernorm_before, layernorm_after=block.layernorm_after
            )
            or why_not_plain(
                nn.Linear, attention__q_proj=attn.q_proj, attention__k_proj=attn.k_proj,
                attention__v_proj=attn.v_proj, attention__o_proj=attn.o_proj, mlp__fc1=mlp.fc1,
                mlp__fc2=mlp.fc2,
            )
            or why_not_gelu(mlp.activation_fn)
        )  # fmt: skip

    def _fastswin_drop_paths(self: Any) -> tuple[nn.Module, nn.Module]:
        return self.drop_path, NO_DROPOUT

    def _fastswin_linears(self: Any) -> Modules:
        attn = self.attention
        return attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, self.mlp.fc1, self.mlp.fc2

    def _fastswin_attend(self: Any, x: torch.Tensor, shift_size: Pair) -> Branch:
        attn = self.attention
        weight, bias = _joined(attn.q_proj, attn.k_proj, attn.v_proj)
        out = ops.window_attention(
            project_qkv(x, weight, bias),
            num_heads=attn.num_attention_heads,
            window_size=pair(int(self.window_size)),
            shift_size=shift_size,
            scale=attn.scaling,
            bias_table=attn.relative_position_bias.relative_position_bias_table,
            qkv_bias=bias,
            sum_qkv_grad=True,
            dropout_p=attn.attention_dropout if attn.training else 0.0,
            impl=self._fastswin.impl,
        )
        return project(attn.o_proj, self.dropout, out)

    def _fastswin_mlp(self: Any, x: torch.Tensor, options: Options) -> Branch:
        if drops(self.dropout):
            return self.dropout(self.mlp(x)), None
        return feed_forward(self.mlp.fc1, self.mlp.fc2, x, options)

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        input_dimensions: Pair,
        always_partition: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        check_stream(hidden_states, self._fastswin_channels(), "[B, H * W, C]")
        config = self.attention.config
        attentions = kwargs.get("output_attentions", getattr(config, "output_attentions", False))
        if attentions or self._fastswin_bypassed():
            return self._fastswin_own_forward(
                hidden_states, input_dimensions, always_partition, **kwargs
            )
        if not always_partition:
            self.set_shift_and_window_size(input_dimensions)
        return self._fastswin_map(hidden_states, input_dimensions), None


class BlockV2(_Block):
    """transformers' Swinv2Layer."""

    POST_NORM = True

    @staticmethod
    def _fastswin_layers_blocker(block: Any) -> str | None:
        attn, own = block.attention, block.attention.self
        return (
            why_not_norm(
                layernorm_before=block.layernorm_before, layernorm_after=block.layernorm_after
            )
            or why_not_plain(
                nn.Linear, attention__self__query=own.query, attention__self__key=own.key,
                attention__self__value=own.value, attention__output__dense=attn.output.dense,
                intermediate__dense=block.intermediate.dense, output__dense=block.output.dense,
            )
            or why_not_gelu(block.intermediate.intermediate_act_fn)
        )  # fmt: skip

    def _fastswin_drop_paths(self: Any) -> tuple[nn.Module, nn.Module]:
        return self.drop_path, self.drop_path

    def _fastswin_linears(self: Any) -> Modules:
        attn = self.attention
        return (
            attn.self.query, attn.self.key, attn.self.value, attn.output.dense,
            self.intermediate.dense, self.output.dense,
        )  # fmt: skip

    def _fastswin_attend(self: Any, x: torch.Tensor, shift_size: Pair) -> Branch:
        attn = self.attention.self
        weight, bias = _joined(attn.query, attn.key, attn.value)
        mlp = attn.continuous_position_bias_mlp
        table = mlp(attn.relative_coords_table).view(-1, attn.num_attention_heads)
        out = ops.window_attention(
            project_qkv(x, weight, bias),
            num_heads=attn.num_attention_heads,
            window_size=pair(attn.window_size),
            shift_size=shift_size,
            logit_scale=attn.logit_scale,
            bias_table=16 * torch.sigmoid(table),
            qkv_bias=bias,
            sum_qkv_grad=True,
            dropout_p=attn.dropout.p if drops(attn.dropout) else 0.0,
            impl=self._fastswin.impl,
        )
        return project(self.attention.output.dense, self.attention.output.dropout, out)

    def _fastswin_mlp(self: Any, x: torch.Tensor, options: Options) -> Branch:
        if drops(self.output.dropout):
            return self.output(self.intermediate(x)), None
        return feed_forward(self.intermediate.dense, self.output.dense, x, options)

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        input_dimensions: Pair,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...]:
        check_stream(hidden_states, self._fastswin_channels(), "[B, H * W, C]")
        if output_attentions or kwargs or self._fastswin_bypassed():
            return self._fastswin_own_forward(
                hidden_states, input_dimensions, output_attentions, **kwargs
            )
        return (self._fastswin_map(hidden_states, input_dimensions),)


_BLOCKS: dict[str, type[Fused]] = {_V1 + "Layer": BlockV1, _V2 + "Layer": BlockV2}
_MERGINGS: dict[str, type[Fused]] = {
    _V1 + "PatchMerging": TokenMergingV1,
    _V2 + "PatchMerging": TokenMergingV2,
}


def block_mixin(name: str, module: Any) -> type[Fused] | None:
    """The mixin of a block, by the full name of its class."""
    return _BLOCKS.get(name)


def merging_mixin(name: str, module: Any) -> type[Fused] | None:
    """The mixin of a patch merging, by the full name of its class."""
    return _MERGINGS.get(name)


def patch_conv(name: str, module: Any) -> nn.Module | None:
    """The patch convolution of an embedding module, by the full name of its class."""
    known = name in (_V1 + "PatchEmbeddings", _V2 + "PatchEmbeddings")
    return module.projection if known else None
