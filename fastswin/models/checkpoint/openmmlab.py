"""OpenMMLab's names (mmpretrain, mmdetection, mmsegmentation).

    stages.i.blocks.j.attn.w_msa.{qkv,proj,...}   stages.i.blocks.j.ffn.layers.0.0 and .layers.1
    patch_embed.projection                        norm<last stage>, head.fc

Merging gathers with ``nn.Unfold``: channels slowest, then row, then column. Its reduction columns
(and, in V1, its norm, which comes before) are permuted to the official order. V1 merges at the end
of a stage, mmpretrain's V2 at the start; shapes decide. A model with a head has ``backbone.``
before everything else.
"""

from __future__ import annotations

import re

import torch

from fastswin.models.checkpoint.layout import Generation, Layout, State, parameters_only
from fastswin.models.checkpoint.merging import (
    merges_at_start,
    move_merging,
    official_to_unfold,
    stage_widths,
    unfold_to_official,
)
from fastswin.models.checkpoint.rename import NameTable
from fastswin.models.config import SwinConfig

_BLOCK, _SOURCE = "layers.{i}.blocks.{j}.", "stages.{i}.blocks.{j}."
_NAMES = NameTable(
    [
        ("patch_embed.proj", "patch_embed.projection"),
        (_BLOCK + "attn", _SOURCE + "attn.w_msa"),
        (_BLOCK + "mlp.fc1", _SOURCE + "ffn.layers.0.0"),
        (_BLOCK + "mlp.fc2", _SOURCE + "ffn.layers.1"),
        ("layers.{i}", "stages.{i}"),
        ("head", "head.fc"),
    ]
)
_MERGING = re.compile(r"^layers\.\d+\.downsample\.(?:norm|reduction)\.(?:weight|bias)$")


def matches(state: State) -> bool:
    """``w_msa`` inside the attention of ``stages``, with or without ``backbone.``."""
    return any(
        re.match(r"^(?:backbone\.)?stages\.\d+\.blocks\.\d+\.attn\.w_msa\.", name) for name in state
    )


def to_official(state: State) -> dict[str, torch.Tensor]:
    """Official names and merging order; the last stage's output norm becomes ``norm``.

    Raises:
        CheckpointError: merging layers that fit neither stage order.
    """
    named = _NAMES.to_official({k.removeprefix("backbone."): v for k, v in state.items()})
    widths = stage_widths(named)
    last = max(widths, default=0)
    if merges_at_start(named):
        named = move_merging(named, -1)
    official = {}
    for name, tensor in named.items():
        if re.match(rf"^norm{last}\.(?:weight|bias)$", name):
            name = "norm." + name.partition(".")[2]
        official[name] = unfold_to_official(tensor) if _gathers(name, tensor, widths) else tensor
    return official


def from_official(
    state: State, config: SwinConfig, generation: Generation = "current"
) -> dict[str, torch.Tensor]:
    """mmpretrain's names: ``backbone.`` and ``head.fc`` when there is a head."""
    del generation  # one signature for all layouts
    widths = {stage: config.dim(stage) for stage in range(config.num_stages)}
    named = {}
    for name, tensor in parameters_only(state).items():
        moved = official_to_unfold(tensor) if _gathers(name, tensor, widths) else tensor
        if name.startswith("norm."):
            name = f"norm{config.num_stages - 1}." + name.removeprefix("norm.")
        named[name] = moved
    if config.version == 2:
        named = move_merging(named, 1)
    source = _NAMES.to_source(named)
    if "head.fc.weight" not in source:
        return source
    return {k if k.startswith("head.") else "backbone." + k: v for k, v in source.items()}


def _gathers(name: str, tensor: torch.Tensor, widths: dict[int, int]) -> bool:
    """Whether the last axis runs over the 4C gathered channels (V2's norm has 2C)."""
    if not _MERGING.match(name):
        return False
    return tensor.shape[-1] == 4 * widths.get(int(name.split(".")[1]), -1)


LAYOUT = Layout(
    name="openmmlab",
    anchor=re.compile(r"^((?:.*?\.)?)stages\.\d+\.blocks\.\d+\.(?:attn\.w_msa|ffn)\."),
    matches=matches,
    to_official=to_official,
    from_official=from_official,
    # its window never shrinks: small maps are padded (pad_small_map) or refused
    window_convention=lambda version: "torchvision",
)
