"""Our own model: nothing to translate."""

from __future__ import annotations

from torch import nn

from fastswin.models.checkpoint.microsoft import LAYOUT
from fastswin.models.config import SwinConfig
from fastswin.models.live.source import LiveSource
from fastswin.models.swin import SwinTransformer


def accepts(module: nn.Module) -> bool:
    """Our model."""
    return isinstance(module, SwinTransformer)


def config_of(module: nn.Module) -> SwinConfig:
    """Its own configuration."""
    assert isinstance(module, SwinTransformer)
    return module.config


SOURCE = LiveSource("fastswin SwinTransformer", accepts, config_of, LAYOUT)
