"""What an engine can be built from: a name, a checkpoint file, a live model.

Each becomes a function that returns a fresh readable model with the source's present weights, so
that ``Engine.refresh`` simply calls it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from fastswin.models import SwinTransformer
from fastswin.models.config import SwinConfig

Loader = Callable[[], SwinTransformer]


def make_loader(
    source: str | os.PathLike | torch.nn.Module, *, pretrained: bool, config: SwinConfig | None
) -> tuple[Loader, str]:
    """The loader of a source and a short description of it.

    Raises:
        TypeError: not a name, path or module.
        ValueError: an unknown name, or an argument that does not apply to this kind of source.
    """
    if isinstance(source, torch.nn.Module):
        if config is not None:
            raise ValueError("config does not apply to a live model, which has its own")
        return _live_loader(source), f"live {type(source).__module__}.{type(source).__name__}"
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            "source must be a model name, a checkpoint path or a torch.nn.Module, "
            f"got {type(source).__name__}"
        )
    path = Path(source)
    if path.exists() or os.sep in str(source) or path.suffix in _CHECKPOINT_SUFFIXES:
        return _checkpoint_loader(path, config), f"checkpoint {path.name}"
    if config is not None:
        raise ValueError("config does not apply to a named model; use models.create_model")
    return _named_loader(str(source), pretrained), f"model {source}"


_CHECKPOINT_SUFFIXES = {".safetensors", ".pth", ".pt", ".bin", ".ckpt"}


def _live_loader(module: torch.nn.Module) -> Loader:
    def load() -> SwinTransformer:
        if isinstance(module, SwinTransformer):
            return module  # prepare() copies
        from fastswin.models import from_live

        return from_live(module)

    return load


def _checkpoint_loader(path: Path, config: SwinConfig | None) -> Loader:
    def load() -> SwinTransformer:
        from fastswin.models import load_checkpoint

        return load_checkpoint(path, config=config).model

    return load


def _named_loader(name: str, pretrained: bool) -> Loader:
    from fastswin.models import create_model, find_variant

    find_variant(name)  # an unknown name fails here, with the nearest ones

    cached: list[SwinTransformer] = []

    def load() -> SwinTransformer:
        if not cached:
            cached.append(create_model(name, pretrained=pretrained))
        return cached[0]

    return load
