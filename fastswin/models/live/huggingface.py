"""transformers' ``Swin[v2]Model`` and ``Swin[v2]ForImageClassification``.

Three facts of that code shape this reader. The norms after the patch embedding and in merging are
built with epsilon 1e-5 whatever ``layer_norm_eps`` says. V1 cannot run a map smaller than its
window. V2 adds the shift mask twice (-200 instead of -100), which matters only for scores further
than 100 apart.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fastswin.models.checkpoint.huggingface import LAYOUT
from fastswin.models.config import SwinConfig
from fastswin.models.live import source
from fastswin.models.live.source import LiveSource, is_a, pair, require

_V1 = "transformers.models.swin.modeling_swin.Swin"
_V2 = "transformers.models.swinv2.modeling_swinv2.Swinv2"


def accepts(module: nn.Module) -> bool:
    """A bare model or a classifier of either version."""
    kinds = ("Model", "ForImageClassification")
    return is_a(module, *(version + kind for version in (_V1, _V2) for kind in kinds))


def config_of(module: Any) -> SwinConfig:
    """Every setting of a transformers model.

    Raises:
        ValueError: another activation, V2 with absolute position embeddings, an image size that
            transformers itself cannot run or resolves in its own way.
    """
    version = 2 if is_a(module, _V2 + "Model", _V2 + "ForImageClassification") else 1
    hf, model = module.config, getattr(module, "swin" if version == 1 else "swinv2", module)
    require(hf.hidden_act == "gelu", "hidden_act", hf.hidden_act, "'gelu'")
    absolute = model.embeddings.position_embeddings is not None
    # its V2 table is one row longer than the map, so its own forward pass fails
    require(not (absolute and version == 2), "use_absolute_embeddings", absolute, "False for V2")
    stages = [list(layer.blocks) for layer in model.encoder.layers]
    blocks = [block for stage in stages for block in stage]
    merging = [s.downsample for s in model.encoder.layers if s.downsample is not None]
    eps = source.norm_eps(
        [*(b.layernorm_before for b in blocks), *(b.layernorm_after for b in blocks),
         model.layernorm], "layernorm",
    )  # fmt: skip
    around_eps = source.norm_eps([model.embeddings.norm, *(m.norm for m in merging)], "norm")
    projection = model.embeddings.patch_embeddings.projection
    config = SwinConfig(
        version=version,  # type: ignore[arg-type]
        image_size=pair(hf.image_size),
        patch_size=source.patch_side(projection),
        in_channels=projection.in_channels,
        num_classes=source.head_classes(getattr(module, "classifier", nn.Identity())),
        embed_dim=projection.out_channels,
        depths=tuple(len(stage) for stage in stages),
        num_heads=tuple(hf.num_heads),
        window_size=pair(hf.window_size),
        window_convention=LAYOUT.window_convention(version),
        mlp_ratio=source.mlp_ratio(_mlp(block) for block in blocks),
        qkv_bias=bool(hf.qkv_bias),
        qk_scale=_qk_scale(blocks) if version == 1 else None,
        drop_rate=float(hf.hidden_dropout_prob),
        attn_drop_rate=float(hf.attention_probs_dropout_prob),
        drop_path_rate=float(hf.drop_path_rate),
        absolute_position_embedding=absolute,
        layer_norm_eps=eps,
        downsample_norm_eps=None if around_eps == eps else around_eps,
        pretrained_window_sizes=_pretrained(hf) if version == 2 else None,
    )
    _check_windows(config, stages)
    return config


def _check_windows(config: SwinConfig, stages: list[list[Any]]) -> None:
    if config.version == 2:
        windows = [[(pair(b.window_size), pair(b.shift_size)) for b in s] for s in stages]
        source.check_windows(config, windows)
        return
    for stage in range(config.num_stages):
        fits = config.stage_window(stage) == config.window_size
        legal = f"one that gives every stage a {config.window_size[0]}-token map or larger"
        require(fits, "image_size", config.image_size, legal)


def _mlp(block: Any) -> tuple[nn.Module, nn.Module]:
    if hasattr(block, "mlp"):
        return block.mlp.fc1, block.mlp.fc2
    return block.intermediate.dense, block.output.dense


def _qk_scale(blocks: list[Any]) -> float | None:
    """The current attention keeps its scale as an attribute, the old one computes the default."""
    scales = [
        (b.attention.scaling, b.attention.head_dim)
        for b in blocks
        if hasattr(b.attention, "scaling")
    ]
    return source.qk_scale(scales) if scales else None


def _pretrained(hf: Any) -> tuple[int, ...] | None:
    sizes = getattr(hf, "pretrained_window_sizes", None)
    return source.any_pretrained(sizes) if sizes is not None else None


SOURCE = LiveSource(
    "transformers Swin[v2]Model and Swin[v2]ForImageClassification", accepts, config_of, LAYOUT
)
