"""Laying official weights over a configuration's parameters, shape by shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fastswin.models.checkpoint.errors import CheckpointError
from fastswin.models.checkpoint.layout import DERIVED, PRETRAINING, State
from fastswin.models.checkpoint.resize import resize_bias_table, resize_position_embedding
from fastswin.models.checkpoint.windows import attention_window
from fastswin.models.config import SwinConfig
from fastswin.models.swin import SwinTransformer

_TABLE = "relative_position_bias_table"
_HEAD = ("head.weight", "head.bias")


class Fit(NamedTuple):
    """Weights that fit, and what became of the others."""

    state: dict[str, torch.Tensor]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]
    ignored: tuple[str, ...]


@functools.lru_cache(maxsize=32)
def expected_shapes(config: SwinConfig) -> dict[str, torch.Size]:
    """Shape of every parameter a configuration has, without allocating any.

    Treat the result as read-only: it is cached.
    """
    with torch.device("meta"):
        model = SwinTransformer(config)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def fit_state(
    state: State,
    config: SwinConfig,
    *,
    resize: bool = False,
    allow_partial: bool = False,
    drop_head: bool = False,
) -> Fit:
    """Sort a state dict with official names into what fits and what does not.

    Args:
        state: official names, derived buffers included.
        config: the model to fit.
        resize: resize bias tables and position embeddings of another size.
        allow_partial: leave a head of another class count at its initial values.
        drop_head: ignore the head, which the model was asked not to have.

    Raises:
        CheckpointError: a shape that does not fit; the message names the key and both shapes.
    """
    expected = expected_shapes(config)
    fitted: dict[str, torch.Tensor] = {}
    unexpected, reshaped, ignored = [], [], []
    for name, tensor in state.items():
        if DERIVED.search(name) or PRETRAINING.match(name) or (drop_head and name in _HEAD):
            ignored.append(name)
        elif name not in expected or (
            name in _HEAD and allow_partial and tensor.shape != expected[name]
        ):
            unexpected.append(name)
        else:
            fitted[name] = _fit_one(name, tensor, expected[name], state, config, resize)
            if fitted[name] is not tensor:
                reshaped.append(
                    f"{name} {list(tensor.shape)} -> {list(fitted[name].shape)} (bicubic)"
                )
    missing = tuple(name for name in expected if name not in fitted)
    return Fit(fitted, missing, tuple(unexpected), tuple(reshaped), tuple(ignored))


def _fit_one(
    name: str,
    tensor: torch.Tensor,
    shape: torch.Size,
    state: State,
    config: SwinConfig,
    resize: bool,
) -> torch.Tensor:
    """The tensor itself, or its resized form."""
    source = target = None
    if name.endswith(_TABLE):
        target = config.stage_window(int(name.split(".")[1]))
        source = attention_window(state, name.removesuffix(_TABLE))
    # 8x12 and 12x8 have as many rows: the index decides where it was saved
    turned = source is not None and source != target and _known_by_index(state, name)
    if tensor.shape == shape and not turned:
        return tensor
    if target is not None and tensor.ndim == 2 and tensor.shape[1] == shape[1]:
        if not resize:
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)}, the model needs {list(shape)} for a "
                f"window of {target[0]}x{target[1]}; pass resize_bias='bicubic' to resize it"
            )
        return resize_bias_table(tensor, target, source_window=source, name=name)
    if name == "absolute_pos_embed" and resize and tensor.shape[2:] == shape[2:]:
        return resize_position_embedding(tensor, config.map_size(0))
    hint = ""
    if name == "absolute_pos_embed":
        hint = "; pass resize_bias='bicubic' to resize it, or config= with its image_size"
    if name in _HEAD:
        hint = f"; pass num_classes={tensor.shape[0]}, or allow_partial=True for a new head"
    raise CheckpointError(
        f"{name} has shape {list(tensor.shape)}, the model needs {list(shape)}{hint}"
    )


def _known_by_index(state: State, name: str) -> bool:
    return name.removesuffix(_TABLE) + "relative_position_index" in state
