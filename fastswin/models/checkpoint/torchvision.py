"""torchvision's names: one flat ``features`` list.

features.0         patch embedding (0 convolution, 2 norm)
features.2i+1      blocks of stage i
features.2i+2      merging after stage i

V2 keeps one ``qkv.bias [3C]`` whose middle third (the keys') its forward pass sets to zero. It is
ignored on the way in and comes back as zeros on the way out.
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

_NAMES = NameTable(
    [
        ("patch_embed.proj", "features.0.0"),
        ("patch_embed.norm", "features.0.2"),
        ("layers.{i}.blocks.{j}.mlp.fc1", "features.{2i+1}.{j}.mlp.0"),
        ("layers.{i}.blocks.{j}.mlp.fc2", "features.{2i+1}.{j}.mlp.3"),
        ("layers.{i}.blocks.{j}", "features.{2i+1}.{j}"),
        ("layers.{i}.downsample", "features.{2i+2}"),
    ]
)
_QKV_BIAS = re.compile(r"^(layers\.\d+\.blocks\.\d+\.attn\.)qkv\.bias$")


def matches(state: State) -> bool:
    """``features.N.M.attn`` with a fused qkv."""
    return any(re.match(r"^features\.\d+\.\d+\.attn\.qkv\.weight$", name) for name in state)


def to_official(state: State) -> dict[str, torch.Tensor]:
    """Official names; V2's fused bias becomes ``q_bias`` and ``v_bias``."""
    named = _NAMES.to_official(state)
    if not is_v2(named):
        return named
    official = {}
    for name, tensor in named.items():
        found = _QKV_BIAS.match(name)
        if found is None:
            official[name] = tensor
            continue
        query, _, value = split_first(name, tensor, 3)
        official[found[1] + "q_bias"], official[found[1] + "v_bias"] = query, value
    return official


def from_official(
    state: State, config: SwinConfig, generation: Generation = "current"
) -> dict[str, torch.Tensor]:
    """torchvision's names; V2's key bias is zeros."""
    del config, generation  # one signature for all layouts
    fused = {}
    for name, tensor in parameters_only(state).items():
        if name.endswith(".attn.v_bias"):
            continue
        if name.endswith(".attn.q_bias"):
            stem = name.removesuffix("q_bias")
            keys = torch.zeros_like(tensor)
            fused[stem + "qkv.bias"] = torch.cat((tensor, keys, state[stem + "v_bias"]))
        else:
            fused[name] = tensor
    return _NAMES.to_source(fused)


LAYOUT = Layout(
    name="torchvision",
    anchor=re.compile(r"^((?:.*?\.)?)features\.\d+\.\d+\.(?:attn|norm1|norm2)\."),
    matches=matches,
    to_official=to_official,
    from_official=from_official,
    window_convention=lambda version: "torchvision",
)
