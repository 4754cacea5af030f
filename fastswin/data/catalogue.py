"""The models that have a name, with their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fastswin.data.shipped import SHIPPED
from fastswin.models import (
    SwinConfig,
    SwinTransformer,
    find_variant,
    list_models,
    load_checkpoint,
)


def count_parameters(config: SwinConfig) -> int:
    """Parameters of a model, counted on the meta device: nothing is allocated."""
    with torch.device("meta"):
        model = SwinTransformer(config)
    return sum(p.numel() for p in model.parameters())


def catalogue() -> Iterator[dict[str, Any]]:
    """One JSON-ready entry a named model, shipped ones first.

    Returns:
        ``name``, ``weights`` ("shipped" or "hub"), ``version``, ``image_size``, ``window_size``,
        ``in_channels``, ``num_classes``, ``embed_dim``, ``depths``, ``num_heads`` and
        ``parameters``.
    """
    for name, path in SHIPPED.items():
        if path.is_file():
            yield _entry(name, "shipped", load_checkpoint(path).model.config)
    for name in list_models():
        yield _entry(name, "hub", find_variant(name))


def _entry(name: str, weights: str, config: SwinConfig) -> dict[str, Any]:
    return {
        "name": name,
        "weights": weights,
        "version": config.version,
        "image_size": list(config.image_size),
        "window_size": list(config.window_size),
        "in_channels": config.in_channels,
        "num_classes": config.num_classes,
        "embed_dim": config.embed_dim,
        "depths": list(config.depths),
        "num_heads": list(config.num_heads),
        "parameters": count_parameters(config),
    }
