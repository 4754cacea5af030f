"""Where the merging layers sit and in which order they gather, told from shapes.

Official releases merge at the END of a stage: ``layers.i.downsample`` maps ``4 C_i -> 2 C_i``.
timm moved it to the START of the next one: ``layers.i.downsample`` maps ``4 C_{i-1} -> C_i``.
Only the shape tells, since both use the same names.
"""

from __future__ import annotations

import re

import torch

from fastswin.models.checkpoint.errors import CheckpointError
from fastswin.models.checkpoint.layout import State

_REDUCTION = re.compile(r"^layers\.(\d+)\.downsample\.reduction\.weight$")


def merging_stages(state: State) -> dict[int, int]:
    """Stage number of each merging layer to its input channels, under ``layers.i.downsample``."""
    return {
        int(found[1]): tensor.shape[1]
        for name, tensor in state.items()
        if (found := _REDUCTION.match(name)) and tensor.ndim == 2
    }


def stage_widths(state: State) -> dict[int, int]:
    """Channels of each stage from the blocks' norms; a gap follows from doubling per stage."""
    widths: dict[int, int] = {}
    stages = set()
    for name, tensor in state.items():
        found = re.match(r"^layers\.(\d+)\.blocks\.\d+\.(\w+\.\w+)", name)
        if found:
            stages.add(int(found[1]))
            if found[2] in ("norm1.weight", "norm2.weight"):
                widths[int(found[1])] = tensor.shape[0]
    if widths:
        known, width = next(iter(sorted(widths.items())))
        for stage in stages - set(widths):
            widths[stage] = width * 2**stage // 2**known
    return widths


def merges_at_start(state: State) -> bool:
    """Whether merging sits at the start of a stage (timm) instead of the end (official).

    Raises:
        CheckpointError: the stages that merge fit neither order.
    """
    merging, widths = merging_stages(state), stage_widths(state)
    at_end = [s for s, channels in merging.items() if channels == 4 * widths.get(s, -1)]
    at_start = [s for s, channels in merging.items() if channels == 4 * widths.get(s - 1, -1)]
    last = max(widths, default=0)
    if len(at_end) == len(merging) and last not in merging:
        return False
    if len(at_start) == len(merging) and 0 not in merging:
        return True
    raise CheckpointError(
        f"ambiguous merging layers: layers.i.downsample exists for stages {sorted(merging)} of "
        f"{len(widths)} with {[merging[s] for s in sorted(merging)]} input channels; legal are "
        "all but the last stage (official order) or all but the first (timm order)"
    )


def move_merging(state: State, stages: int) -> dict[str, torch.Tensor]:
    """Renumber ``layers.i.downsample`` by ``stages`` (+1 official to timm, -1 back)."""

    def renumber(found: re.Match[str]) -> str:
        return f"layers.{int(found[1]) + stages}.downsample"

    return {
        re.sub(r"^layers\.(\d+)\.downsample", renumber, name): tensor
        for name, tensor in state.items()
    }


def unfold_to_official(tensor: torch.Tensor) -> torch.Tensor:
    """Merging columns from ``nn.Unfold`` order to the official one, on the last axis ``4C``.

    Unfold counts ``c * 4 + row * 2 + column``, the official concatenation
    ``(column * 2 + row) * C + c``.
    """
    *lead, width = tensor.shape
    split = tensor.reshape(*lead, width // 4, 2, 2)  # channel, row, column
    return split.movedim((-3, -2, -1), (-1, -2, -3)).reshape(*lead, width)


def official_to_unfold(tensor: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`unfold_to_official`."""
    *lead, width = tensor.shape
    split = tensor.reshape(*lead, 2, 2, width // 4)  # column, row, channel
    return split.movedim((-3, -2, -1), (-1, -2, -3)).reshape(*lead, width)
