"""What a source layout is: how to recognise it, and its names in both directions.

``to_official`` takes a state dict whose outer prefix is gone and gives official names; names it
does not know stay as they are, so that the loader can report them. ``from_official`` is its
inverse on parameters.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from fastswin.models.config import WindowConvention

State = Mapping[str, torch.Tensor]
Generation = Literal["current", "old"]

#: Buffers that follow from the configuration; recomputed, never loaded.
DERIVED = re.compile(r"(?:^|\.)(?:attn_mask|relative_position_index|relative_coords_table|k_bias)$")

#: Training-only parts of SimMIM and masked-image checkpoints.
PRETRAINING = re.compile(r"^(?:mask_token|decoder\..*|embeddings\.mask_token)$")


@dataclasses.dataclass(frozen=True)
class Layout:
    """One source layout.

    Attributes:
        name: "microsoft", "timm", "torchvision", "huggingface" or "openmmlab".
        anchor: matches a block's names from their beginning; group 1 is the outer prefix.
        matches: whether a state dict without outer prefix is of this layout, by names and shapes.
        to_official: source names to official names.
        from_official: official names to source names, ``(state, config, generation)``.
        window_convention: the framework's rule for small maps, by version.
    """

    name: str
    anchor: re.Pattern[str]
    matches: Callable[[State], bool]
    to_official: Callable[[State], dict[str, torch.Tensor]]
    from_official: Callable[..., dict[str, torch.Tensor]]
    window_convention: Callable[[int], WindowConvention]


def block_anchor(stem: str, inner: str) -> re.Pattern[str]:
    """``<prefix><stem>.<i>.blocks.<j>.<inner>`` with the prefix as group 1."""
    return re.compile(rf"^((?:.*?\.)?){stem}\.\d+\.blocks\.\d+\.(?:{inner})(?:\.|$)")


def parameters_only(state: State) -> dict[str, torch.Tensor]:
    """Without derived buffers."""
    return {name: tensor for name, tensor in state.items() if not DERIVED.search(name)}


def is_v2(state: State) -> bool:
    """Whether a state dict of any layout has V2's cosine attention."""
    return any(name.endswith(".logit_scale") for name in state)


def split_first(name: str, tensor: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
    """Equal parts along axis 0; CheckpointError names the tensor when they are not equal."""
    if tensor.shape[0] % parts:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, axis 0 is no multiple of {parts}"
        )
    return torch.chunk(tensor, parts)
