"""Hugging Face's names (transformers), both generations of V1 and V2.

              old (V1 and V2)            current (V1 since transformers 5)
query         attention.self.query       attention.q_proj
projection    attention.output.dense     attention.o_proj
fc1, fc2      intermediate.dense, output.dense        mlp.fc1, mlp.fc2

Query, key and value are three layers; ours is one ``qkv`` in that order. V2's key has no bias.
A model with a classifier has ``swin.`` or ``swinv2.`` before everything else.
"""

from __future__ import annotations

import re

import torch

from fastswin.models.checkpoint.layout import (
    Generation,
    Layout,
    State,
    is_v2,
    parameters_only,
    split_first,
)
from fastswin.models.checkpoint.rename import NameTable
from fastswin.models.config import SwinConfig

_BLOCK, _SOURCE = "layers.{i}.blocks.{j}.", "encoder.layers.{i}.blocks.{j}."
_SHARED = [
    ("patch_embed.proj", "embeddings.patch_embeddings.projection"),
    ("patch_embed.norm", "embeddings.norm"),
    ("absolute_pos_embed", "embeddings.position_embeddings"),
    (_BLOCK + "norm1", _SOURCE + "layernorm_before"),
    (_BLOCK + "norm2", _SOURCE + "layernorm_after"),
    ("layers.{i}.downsample", "encoder.layers.{i}.downsample"),
    ("norm", "layernorm"),
    ("head", "classifier"),
]
_ATTENTION = {  # ours: (old, current)
    "attn.q": ("attention.self.query", "attention.q_proj"),
    "attn.k": ("attention.self.key", "attention.k_proj"),
    "attn.v": ("attention.self.value", "attention.v_proj"),
    "attn.proj": ("attention.output.dense", "attention.o_proj"),
    "attn.relative_position_bias_table": (
        "attention.self.relative_position_bias_table",
        "attention.relative_position_bias.relative_position_bias_table",
    ),
    "attn.relative_position_index": (
        "attention.self.relative_position_index",
        "attention.relative_position_bias.relative_position_index",
    ),
    "attn.relative_coords_table": (
        "attention.self.relative_coords_table",
        "attention.relative_coords_table",
    ),
    "attn.logit_scale": ("attention.self.logit_scale", "attention.logit_scale"),
    "attn.cpb_mlp": (
        "attention.self.continuous_position_bias_mlp",
        "attention.continuous_position_bias_mlp",
    ),
    "mlp.fc1": ("intermediate.dense", "mlp.fc1"),
    "mlp.fc2": ("output.dense", "mlp.fc2"),
}
_OLD = [(_BLOCK + ours, _SOURCE + old) for ours, (old, _) in _ATTENTION.items()]
_CURRENT = [(_BLOCK + ours, _SOURCE + new) for ours, (_, new) in _ATTENTION.items()]
_NAMES = {"old": NameTable(_SHARED + _OLD + _CURRENT), "current": NameTable(_SHARED + _CURRENT)}

_QUERY = re.compile(r"^(layers\.\d+\.blocks\.\d+\.attn\.)q\.(weight|bias)$")
_QKV = re.compile(r"^(layers\.\d+\.blocks\.\d+\.attn\.)qkv\.(weight|bias)$")
_PREFIX = re.compile(r"^(?:swin|swinv2)\.")


def matches(state: State) -> bool:
    """Separate query layers under ``encoder.layers``, with or without ``swin.``."""
    return any(
        re.match(
            r"^(?:swinv?2?\.)?encoder\.layers\.\d+\.blocks\.\d+\.attention\."
            r"(?:self\.query|q_proj)\.weight$",
            name,
        )
        for name in state
    )


def to_official(state: State) -> dict[str, torch.Tensor]:
    """Official names with a fused qkv; V2's biases become ``q_bias`` and ``v_bias``."""
    named = _NAMES["old"].to_official({_PREFIX.sub("", k): v for k, v in state.items()})
    version_2 = is_v2(named)
    official = dict(named)
    for name in named:
        found = _QUERY.match(name)
        if found is None:
            continue
        stem, kind = found.groups()
        sources = [f"{stem}{part}.{kind}" for part in "qkv"]
        if version_2 and kind == "bias":
            official[stem + "q_bias"] = official.pop(sources[0])
            if sources[2] in official:
                official[stem + "v_bias"] = official.pop(sources[2])
        elif all(source in official for source in sources):
            official[f"{stem}qkv.{kind}"] = torch.cat([official.pop(s) for s in sources])
    return official


def from_official(
    state: State, config: SwinConfig, generation: Generation = "current"
) -> dict[str, torch.Tensor]:
    """Hugging Face's names; current V2 still uses the old ones, as transformers does."""
    split: dict[str, torch.Tensor] = {}
    for name, tensor in parameters_only(state).items():
        found = _QKV.match(name)
        if found is not None:
            for part, piece in zip("qkv", split_first(name, tensor, 3), strict=True):
                split[f"{found[1]}{part}.{found[2]}"] = piece
        elif name.endswith(("attn.q_bias", "attn.v_bias")):
            split[re.sub(r"([qv])_bias$", r"\1.bias", name)] = tensor
        else:
            split[name] = tensor
    table = _NAMES["old" if config.version == 2 else generation]
    named = table.to_source(split)
    if "classifier.weight" not in named:
        return named
    prefix = "swin." if config.version == 1 else "swinv2."
    return {k if k.startswith("classifier.") else prefix + k: v for k, v in named.items()}


LAYOUT = Layout(
    name="huggingface",
    anchor=re.compile(
        r"^((?:.*?\.)?)encoder\.layers\.\d+\.blocks\.\d+\."
        r"(?:attention|layernorm_before|layernorm_after)\."
    ),
    matches=matches,
    to_official=to_official,
    from_official=from_official,
    window_convention=lambda version: "microsoft" if version == 1 else "timm",
)
