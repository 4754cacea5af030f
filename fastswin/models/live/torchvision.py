"""torchvision's ``SwinTransformer``, V1 and V2 (told by the class of its blocks).

torchvision models know no image size; it is taken as the smallest on which every stage holds a
whole window. Their windows never shrink, so nothing else depends on it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fastswin.models.checkpoint.torchvision import LAYOUT
from fastswin.models.config import SwinConfig
from fastswin.models.live import source
from fastswin.models.live.source import LiveSource, is_a, only, pair, require

_MODULE = "torchvision.models.swin_transformer."


def accepts(module: nn.Module) -> bool:
    """torchvision's Swin class, of either version."""
    return is_a(module, _MODULE + "SwinTransformer")


def config_of(module: Any) -> SwinConfig:
    """Every setting of a torchvision model.

    Raises:
        ValueError: other block, merging, norm or activation classes.
    """
    patch_embed, *rest = module.features
    stages, merging = [list(s) for s in rest[0::2]], list(rest[1::2])
    blocks = [block for stage in stages for block in stage]
    suffix = only((_suffix(block, "SwinTransformerBlock") for block in blocks), "block")
    version = 2 if suffix == "V2" else 1
    for attention in (block.attn for block in blocks):
        same = _suffix(attention, "ShiftedWindowAttention") == suffix
        require(same, "attn_layer", type(attention).__name__, "that of the blocks' version")
    for merge in merging:
        same = _suffix(merge, "PatchMerging") == suffix
        require(same, "downsample_layer", type(merge).__name__, "that of the blocks' version")
    for block in blocks:
        source.check_gelu(block.mlp[1])
    eps = source.norm_eps(
        [*(b.norm1 for b in blocks), *(b.norm2 for b in blocks), module.norm], "norm_layer"
    )
    around_eps = source.norm_eps([patch_embed[2], *(m.norm for m in merging)], "norm_layer")
    window = only((pair(b.attn.window_size) for b in blocks), "window_size")
    patch = source.patch_side(patch_embed[0])
    scale = patch * 2 ** (len(stages) - 1)
    config = SwinConfig(
        version=version,  # type: ignore[arg-type]
        image_size=(window[0] * scale, window[1] * scale),
        patch_size=patch,
        in_channels=patch_embed[0].in_channels,
        num_classes=source.head_classes(module.head),
        embed_dim=patch_embed[0].out_channels,
        depths=tuple(len(stage) for stage in stages),
        num_heads=tuple(only((b.attn.num_heads for b in s), "num_heads") for s in stages),
        window_size=window,
        window_convention="torchvision",
        mlp_ratio=source.mlp_ratio((b.mlp[0], b.mlp[3]) for b in blocks),
        qkv_bias=only((b.attn.qkv.bias is not None for b in blocks), "qkv_bias"),
        drop_rate=only((b.attn.dropout for b in blocks), "dropout"),
        attn_drop_rate=only((b.attn.attention_dropout for b in blocks), "attention_dropout"),
        drop_path_rate=source.drop_path_rate(blocks, "stochastic_depth", "p"),
        layer_norm_eps=eps,
        downsample_norm_eps=None if around_eps == eps else around_eps,
    )
    source.check_widths(config, [[b.attn.qkv.in_features for b in stage] for stage in stages])
    for stage in stages:
        for index, block in enumerate(stage):
            expected = (window[0] // 2, window[1] // 2) if index % 2 else (0, 0)
            shift = pair(block.attn.shift_size)
            require(shift == expected, "shift_size", shift, f"{expected}")
    return config


def _suffix(module: nn.Module, base: str) -> str:
    """ "" or "V2": which of torchvision's two classes of a kind a layer is."""
    kind = getattr(type(module), "_fastswin_original", type(module))  # an accelerated block's own
    for suffix in ("", "V2"):
        if f"{kind.__module__}.{kind.__name__}" == _MODULE + base + suffix:
            return suffix
    raise ValueError(
        f"unsupported {base}={type(module).__name__}; legal: torchvision's {base} and {base}V2"
    )


SOURCE = LiveSource("torchvision SwinTransformer (V1, V2)", accepts, config_of, LAYOUT)
