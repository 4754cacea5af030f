"""timm's ``SwinTransformer`` and ``SwinTransformerV2``.

timm pads after the cyclic shift; fastswin pads before. The two agree wherever the map is a
multiple of the window, and on other maps fastswin follows the order that keeps opposite edges
apart.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from fastswin.models.checkpoint.timm import LAYOUT
from fastswin.models.config import SwinConfig
from fastswin.models.live import source
from fastswin.models.live.source import LiveSource, is_a, only, pair, require

_logger = logging.getLogger(__name__)

_V1 = "timm.models.swin_transformer.SwinTransformer"
_V2 = "timm.models.swin_transformer_v2.SwinTransformerV2"


def accepts(module: nn.Module) -> bool:
    """One of timm's two Swin classes."""
    return is_a(module, _V1, _V2)


def config_of(module: Any) -> SwinConfig:
    """Every setting of a timm model.

    Raises:
        ValueError: always_partition, another pooling, activation or norm, windows per stage.
    """
    version = 2 if is_a(module, _V2) else 1
    stages = [list(layer.blocks) for layer in module.layers]
    blocks = [block for stage in stages for block in stage]
    partition = any(getattr(block, "always_partition", False) for block in blocks)
    require(not partition, "always_partition", partition, "False")
    pool = getattr(module.head.global_pool, "pool_type", None)
    require(pool == "avg", "global_pool", pool, "'avg'")
    for block in blocks:
        source.check_gelu(block.mlp.act)
        inner = getattr(block.mlp, "norm", nn.Identity())
        require(isinstance(inner, nn.Identity), "mlp.norm", inner, "none")
        attention_width = block.attn.qkv.out_features // 3
        require(attention_width == block.attn.dim, "head_dim", attention_width, "dim / num_heads")
    if module.head.drop.p:
        _logger.warning("drop_rate=%s before timm's head is left out", module.head.drop.p)
    merging = [m for s in module.layers if not isinstance(m := s.downsample, nn.Identity)]
    patch_norm = not isinstance(module.patch_embed.norm, nn.Identity)
    around = [m.norm for m in merging] + ([module.patch_embed.norm] if patch_norm else [])
    eps = source.norm_eps(
        [*(b.norm1 for b in blocks), *(b.norm2 for b in blocks), module.norm], "norm_layer"
    )
    around_eps = source.norm_eps(around, "norm_layer") if around else eps
    config = SwinConfig(
        version=version,  # type: ignore[arg-type]
        image_size=pair(module.patch_embed.img_size),
        patch_size=source.patch_side(module.patch_embed.proj),
        in_channels=module.patch_embed.proj.in_channels,
        num_classes=source.head_classes(module.head.fc),
        embed_dim=module.patch_embed.proj.out_channels,
        depths=tuple(len(stage) for stage in stages),
        num_heads=tuple(only((b.attn.num_heads for b in s), "num_heads") for s in stages),
        window_size=source.largest_window(pair(b.window_size) for b in blocks),
        window_convention="timm",
        mlp_ratio=source.mlp_ratio((b.mlp.fc1, b.mlp.fc2) for b in blocks),
        qkv_bias=only((_qkv_bias(b.attn, version) for b in blocks), "qkv_bias"),
        qk_scale=_qk_scale(blocks) if version == 1 else None,
        drop_rate=only((b.attn.proj_drop.p for b in blocks), "proj_drop_rate"),
        attn_drop_rate=only((b.attn.attn_drop.p for b in blocks), "attn_drop_rate"),
        drop_path_rate=source.drop_path_rate(blocks, "drop_path1", "drop_prob"),
        patch_norm=patch_norm,
        layer_norm_eps=eps,
        downsample_norm_eps=None if around_eps == eps else around_eps,
        pretrained_window_sizes=_pretrained(stages) if version == 2 else None,
    )
    source.check_widths(config, [[b.attn.dim for b in stage] for stage in stages])
    source.check_windows(
        config, [[(pair(b.window_size), pair(b.shift_size)) for b in stage] for stage in stages]
    )
    return config


def _qkv_bias(attention: Any, version: int) -> bool:
    return (attention.qkv.bias if version == 1 else attention.q_bias) is not None


def _qk_scale(blocks: list[Any]) -> float | None:
    return source.qk_scale((b.attn.scale, b.attn.dim // b.attn.num_heads) for b in blocks)


def _pretrained(stages: list[list[Any]]) -> tuple[int, ...] | None:
    return source.any_pretrained(stage[0].attn.pretrained_window_size for stage in stages)


SOURCE = LiveSource("timm SwinTransformer and SwinTransformerV2", accepts, config_of, LAYOUT)
