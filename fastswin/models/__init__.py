"""Swin Transformer models: configuration, the readable model, checkpoints."""

from fastswin.models.checkpoint import (
    CheckpointError,
    LoadedCheckpoint,
    LoadReport,
    load_checkpoint,
    save_checkpoint,
)
from fastswin.models.config import SwinConfig
from fastswin.models.create import create_model
from fastswin.models.live import config_of, from_live, official_state
from fastswin.models.swin import SwinTransformer
from fastswin.models.variants import VARIANTS, find_variant, list_models

__all__ = [
    "VARIANTS",
    "CheckpointError",
    "LoadReport",
    "LoadedCheckpoint",
    "SwinConfig",
    "SwinTransformer",
    "config_of",
    "create_model",
    "find_variant",
    "from_live",
    "list_models",
    "load_checkpoint",
    "official_state",
    "save_checkpoint",
]
