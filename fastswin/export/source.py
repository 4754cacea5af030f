"""What can be exported: a name, a checkpoint file, a live model; and the images to check it on."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import torch
from torch import nn

from fastswin.data.shipped import SHIPPED
from fastswin.data.source import open_source
from fastswin.data.test_set import shipped_test_set
from fastswin.models import SwinTransformer, from_live

Source = str | os.PathLike | nn.Module

_CHECKPOINT_SUFFIXES = {".safetensors", ".pth", ".pt", ".bin", ".ckpt"}


def open_model(
    source: Source, *, pretrained: bool = True
) -> tuple[SwinTransformer, str, torch.Tensor | None]:
    """A readable model, a short description of its source, and real images where they ship.

    Args:
        source: a shipped or published name, a checkpoint's path, or a live model of any framework
            that :func:`fastswin.models.from_live` knows.
        pretrained: whether a published name gets its weights or random ones.

    Returns:
        A model of its own, on the CPU and in evaluation mode; the description; normalised images
        ``[8, C, h, w]`` of the shipped test set for a shipped model, else None.

    Raises:
        TypeError: not a name, path or module.
        ValueError, FileNotFoundError, RuntimeError: as :func:`fastswin.data.source.open_source`.
    """
    if isinstance(source, nn.Module):
        model = copy.deepcopy(source) if isinstance(source, SwinTransformer) else from_live(source)
        return model.cpu().eval(), f"live {type(source).__name__}", None
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            "source must be a model name, a checkpoint path or a torch.nn.Module, "
            f"got {type(source).__name__}"
        )
    path = Path(source)
    if path.exists() or os.sep in str(source) or path.suffix in _CHECKPOINT_SUFFIXES:
        return open_source(checkpoint=path).model, f"checkpoint {path.name}", None
    opened = open_source(str(source), pretrained=pretrained)
    images = None
    if source in SHIPPED:
        images, _ = next(shipped_test_set(opened, 8).batches(8))
    return opened.model, str(source), images
