"""Blocks whose layers have the official names: timm's, Microsoft's and our own.

norm1, attn.qkv, attn.proj, norm2, mlp.fc1, mlp.fc2; V2: attn.logit_scale, q_bias, v_bias, cpb_mlp
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastswin import ops
from fastswin.accelerate.block import FusedBlock, Modules, Pair
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
from fastswin.accelerate.swap import Options
from fastswin.models.live.source import pair

NO_DROPOUT = nn.Identity()


class OfficialBlock(FusedBlock):
    """Layers by the official names; V1 and V2 differ by what ``attn`` holds."""

    @staticmethod
    def _fastswin_layers_blocker(block: Any) -> str | None:
        attn, mlp = block.attn, block.mlp
        reason = why_not_norm(norm1=block.norm1, norm2=block.norm2)
        if reason is None and not (hasattr(mlp, "fc1") and hasattr(mlp, "fc2")):
            reason = f"mlp is a {type(mlp).__name__} without fc1 and fc2"
        if reason is None:
            reason = why_not_plain(
                nn.Linear, attn__qkv=attn.qkv, attn__proj=attn.proj, mlp__fc1=mlp.fc1,
                mlp__fc2=mlp.fc2,
            )  # fmt: skip
        if reason is None and not isinstance(getattr(mlp, "norm", NO_DROPOUT), nn.Identity):
            reason = f"mlp.norm is a {type(mlp.norm).__name__}"
        return reason or why_not_gelu(getattr(mlp, "act", nn.GELU()))

    def _fastswin_norms(self: Any) -> tuple[Any, Any]:
        return self.norm1, self.norm2

    def _fastswin_drop_paths(self: Any) -> tuple[nn.Module, nn.Module]:
        drop_path = getattr(self, "drop_path", NO_DROPOUT)
        return drop_path, drop_path

    def _fastswin_linears(self: Any) -> Modules:
        return self.attn.qkv, self.attn.proj, self.mlp.fc1, self.mlp.fc2

    def _fastswin_attend(self: Any, x: torch.Tensor, shift_size: Pair) -> Branch:
        attn = self.attn
        qkv_bias = qkv_bias_of(attn)
        dropout: Any = getattr(attn, "attn_drop", NO_DROPOUT)
        out = ops.window_attention(
            project_qkv(x, attn.qkv.weight, qkv_bias),
            num_heads=attn.num_heads,
            window_size=pair(attn.window_size),
            shift_size=shift_size,
            qkv_bias=qkv_bias,
            sum_qkv_grad=True,
            dropout_p=dropout.p if drops(dropout) else 0.0,
            impl=self._fastswin.impl,
            **position_of(attn),
        )
        return project(attn.proj, getattr(attn, "proj_drop", NO_DROPOUT), out)

    def _fastswin_mlp(self: Any, x: torch.Tensor, options: Options) -> Branch:
        mlp = self.mlp
        if any(drops(getattr(mlp, n, NO_DROPOUT)) for n in ("drop", "drop1", "drop2")):
            return mlp(x), None
        return feed_forward(mlp.fc1, mlp.fc2, x, options)


def qkv_bias_of(attn: Any) -> torch.Tensor | None:
    """Bias of the qkv projection ``[3C]``; V2 has none on the keys."""
    if not hasattr(attn, "logit_scale"):
        return attn.qkv.bias
    if attn.q_bias is None:
        return None
    return torch.cat((attn.q_bias, torch.zeros_like(attn.v_bias), attn.v_bias))


def position_of(attn: Any) -> dict[str, Any]:
    """Scale and bias arguments of :func:`fastswin.ops.window_attention`."""
    if not hasattr(attn, "logit_scale"):
        return {"scale": attn.scale, "bias_table": attn.relative_position_bias_table}
    table = attn.cpb_mlp(attn.relative_coords_table).view(-1, attn.num_heads)
    return {"logit_scale": attn.logit_scale, "bias_table": 16 * torch.sigmoid(table)}
