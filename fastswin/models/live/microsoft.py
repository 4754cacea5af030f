"""Modules in the style of microsoft/Swin-Transformer, recognised by their attributes.

That code is copied into many repositories under many names, so no class name tells it. What it has
in common: ``patch_embed.patches_resolution``, ``layers[i].blocks[j].attn`` with a bias table or a
bias MLP, and merging at the end of a stage.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fastswin.models.checkpoint.microsoft import LAYOUT
from fastswin.models.config import SwinConfig
from fastswin.models.live import source
from fastswin.models.live.source import LiveSource, only, pair, require


def accepts(module: Any) -> bool:
    """A module with the attributes named above."""
    try:
        attention = module.layers[0].blocks[0].attn
        resolution = module.patch_embed.patches_resolution
    except (AttributeError, IndexError, TypeError, KeyError):
        return False
    tables = ("relative_position_bias_table", "cpb_mlp", "rpe_mlp")
    return len(resolution) == 2 and any(hasattr(attention, name) for name in tables)


def config_of(module: Any) -> SwinConfig:
    """Every setting of a Microsoft-style model.

    Raises:
        ValueError: experts, another activation or norm, windows per stage.
    """
    stages = [list(layer.blocks) for layer in module.layers]
    blocks = [block for stage in stages for block in stage]
    version = 2 if hasattr(blocks[0].attn, "logit_scale") else 1
    for block in blocks:
        known = hasattr(block.mlp, "fc1") and hasattr(block.mlp, "fc2")
        require(known, "mlp", type(block.mlp).__name__, "fc1 and fc2 (no experts)")
        require(not hasattr(block, "norm3"), "norm3", True, "two norms per block")
        source.check_gelu(getattr(block.mlp, "act", nn.GELU()))
    downsamples = [getattr(layer, "downsample", None) for layer in module.layers]
    merging = [downsample for downsample in downsamples if downsample is not None]
    embed_norm = getattr(module.patch_embed, "norm", None)
    patch_norm = embed_norm is not None and not isinstance(embed_norm, nn.Identity)
    around = [m.norm for m in merging] + ([embed_norm] if patch_norm else [])
    eps = source.norm_eps(
        [*(b.norm1 for b in blocks), *(b.norm2 for b in blocks), module.norm], "norm_layer"
    )
    around_eps = source.norm_eps(around, "norm_layer") if around else eps
    window = source.largest_window(pair(b.window_size) for b in blocks)
    config = SwinConfig(
        version=version,  # type: ignore[arg-type]
        image_size=pair(module.patch_embed.img_size),
        patch_size=source.patch_side(module.patch_embed.proj),
        in_channels=module.patch_embed.proj.in_channels,
        num_classes=source.head_classes(getattr(module, "head", nn.Identity())),
        embed_dim=module.patch_embed.proj.out_channels,
        depths=tuple(len(stage) for stage in stages),
        num_heads=tuple(only((b.attn.num_heads for b in s), "num_heads") for s in stages),
        window_size=window,
        window_convention="microsoft" if window[0] == window[1] else "timm",
        mlp_ratio=source.mlp_ratio((b.mlp.fc1, b.mlp.fc2) for b in blocks),
        qkv_bias=only((_qkv_bias(b.attn, version) for b in blocks), "qkv_bias"),
        qk_scale=_qk_scale(blocks) if version == 1 else None,
        drop_rate=only((_rate(b.attn, "proj_drop") for b in blocks), "drop_rate"),
        attn_drop_rate=only((_rate(b.attn, "attn_drop") for b in blocks), "attn_drop_rate"),
        drop_path_rate=source.drop_path_rate(blocks, "drop_path", "drop_prob"),
        absolute_position_embedding=getattr(module, "absolute_pos_embed", None) is not None,
        patch_norm=patch_norm,
        layer_norm_eps=eps,
        downsample_norm_eps=None if around_eps == eps else around_eps,
        pretrained_window_sizes=_pretrained(stages) if version == 2 else None,
    )
    source.check_widths(config, [[b.attn.qkv.in_features for b in stage] for stage in stages])
    source.check_windows(
        config, [[(pair(b.window_size), pair(b.shift_size)) for b in stage] for stage in stages]
    )
    return config


def _qkv_bias(attention: Any, version: int) -> bool:
    return (attention.qkv.bias if version == 1 else attention.q_bias) is not None


def _qk_scale(blocks: list[Any]) -> float | None:
    return source.qk_scale(
        (b.attn.scale, b.attn.qkv.in_features // b.attn.num_heads) for b in blocks
    )


def _rate(attention: Any, name: str) -> float:
    return float(getattr(getattr(attention, name, None), "p", 0.0))


def _pretrained(stages: list[list[Any]]) -> tuple[int, ...] | None:
    return source.any_pretrained(
        getattr(stage[0].attn, "pretrained_window_size", 0) for stage in stages
    )


SOURCE = LiveSource(
    "modules in Microsoft's style (layers[i].blocks[j].attn, patch_embed.patches_resolution)",
    accepts, config_of, LAYOUT,
)  # fmt: skip
