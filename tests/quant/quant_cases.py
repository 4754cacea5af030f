"""Tiny models and images that the quantisation tests share."""

from __future__ import annotations

import torch
from swin_references import our_model

from fastswin import quant
from fastswin.models import SwinTransformer

#: Maps (9x13, then 5x7) that are no multiple of the 4x4 window or of 2; 24 channels; 15 classes.
ODD = (34, 50)

#: Every scheme that a test runs over, by name.
SCHEMES = {
    **quant.PRESETS,
    "per_token": quant.Scheme(
        "per_token",
        qkv=quant.LayerScheme(activation="per_token", output="quantized"),
        fc1=quant.LayerScheme(activation="per_token"),
        reduction=quant.LayerScheme(activation="per_token"),
    ),
    "per_tensor_weights": quant.Scheme(
        "per_tensor_weights",
        **{k: quant.LayerScheme(weight="per_tensor") for k in ("qkv", "proj", "fc1", "fc2")},
    ),
}


def tiny(version: int = 1, **settings) -> SwinTransformer:
    """Two stages of 24 and 48 channels with perturbed weights, in eval mode."""
    sizes = {"embed_dim": 24, "num_heads": (1, 2), "image_size": ODD, "num_classes": 15}
    return our_model(version, **{**sizes, **settings})


def images_like(model: SwinTransformer, batch: int = 2, seed: int = 11) -> torch.Tensor:
    """Distinct seeded images for a model."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, model.config.in_channels, *model.config.image_size)
    return torch.randn(shape, generator=generator)
