"""Official names (microsoft/Swin-Transformer): V1, V2, 22k heads and SimMIM.

These are the model's own names, so nothing but one old word changes: SimMIM releases of V2 call
the bias MLP ``rpe_mlp``. SimMIM's outer ``encoder.`` is a prefix like any other; its
``mask_token`` and ``decoder.*`` belong to pre-training and are ignored by the loader.
"""

from __future__ import annotations

import re

import torch

from fastswin.models.checkpoint.layout import (
    Generation,
    Layout,
    State,
    block_anchor,
    parameters_only,
)
from fastswin.models.checkpoint.merging import merges_at_start
from fastswin.models.config import SwinConfig

_OLD_BIAS_MLP = re.compile(r"(\.attn\.)rpe_mlp\.")
_BLOCK = re.compile(
    r"^layers\.\d+\.blocks\.\d+\.attn\.(?:qkv|relative_position_bias_table|cpb_mlp)"
)


def matches(state: State) -> bool:
    """Official block names and a head that is one linear layer."""
    return any(_BLOCK.match(name) for name in state) and "head.fc.weight" not in state


def to_official(state: State) -> dict[str, torch.Tensor]:
    """Official names, with ``rpe_mlp`` read as ``cpb_mlp``.

    Raises:
        CheckpointError: merging layers that fit neither stage order.
    """
    merges_at_start(state)
    return {_OLD_BIAS_MLP.sub(r"\1cpb_mlp.", name): tensor for name, tensor in state.items()}


def from_official(
    state: State, config: SwinConfig, generation: Generation = "current"
) -> dict[str, torch.Tensor]:
    """The parameters as they are; ``generation="old"`` writes ``rpe_mlp`` for V2."""
    del config  # one signature for all layouts
    state = parameters_only(state)
    if generation == "current":
        return state
    return {name.replace(".attn.cpb_mlp.", ".attn.rpe_mlp."): t for name, t in state.items()}


LAYOUT = Layout(
    name="microsoft",
    anchor=block_anchor("layers", r"attn|norm1|norm2"),
    matches=matches,
    to_official=to_official,
    from_official=from_official,
    window_convention=lambda version: "microsoft",
)
