"""Swin Transformer models: configuration, the readable model, checkpoints."""

from fastswin.models.config import SwinConfig
from fastswin.models.swin import SwinTransformer
from fastswin.models.variants import VARIANTS, find_variant, list_models

__all__ = ["VARIANTS", "SwinConfig", "SwinTransformer", "find_variant", "list_models"]
