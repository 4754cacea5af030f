"""timm's names (huggingface/pytorch-image-models), both generations.

current   merging at the start of a stage, ``head.fc``
old       merging at the end of a stage, ``head`` (as the official release)

Either half is decided on its own: merging from shapes, the head from its name, so files written
between the two generations load as well.
"""

from __future__ import annotations

import torch

from fastswin.models.checkpoint.layout import (
    Generation,
    Layout,
    State,
    block_anchor,
    parameters_only,
)
from fastswin.models.checkpoint.merging import (
    merges_at_start,
    merging_stages,
    move_merging,
    stage_widths,
)
from fastswin.models.config import SwinConfig


def matches(state: State) -> bool:
    """Official block names with merging in the last stage or a ``head.fc``."""
    widths = stage_widths(state)
    if not widths:
        return False
    return "head.fc.weight" in state or max(widths) in merging_stages(state)


def to_official(state: State) -> dict[str, torch.Tensor]:
    """Merging back to the end of its stage, ``head.fc`` to ``head``.

    Raises:
        CheckpointError: merging layers that fit neither stage order.
    """
    moved = move_merging(state, -1) if merges_at_start(state) else dict(state)
    return {_swap(name, "head.fc.", "head."): tensor for name, tensor in moved.items()}


def from_official(
    state: State, config: SwinConfig, generation: Generation = "current"
) -> dict[str, torch.Tensor]:
    """The parameters under current names, or unchanged for ``generation="old"``."""
    del config  # one signature for all layouts
    state = parameters_only(state)
    if generation == "old":
        return state
    moved = move_merging(state, 1)
    return {_swap(name, "head.", "head.fc."): tensor for name, tensor in moved.items()}


def _swap(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


LAYOUT = Layout(
    name="timm",
    anchor=block_anchor("layers", r"attn|norm1|norm2"),
    matches=matches,
    to_official=to_official,
    from_official=from_official,
    window_convention=lambda version: "timm",
)
