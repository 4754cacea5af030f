"""Every published Swin Transformer by timm's name.

The table restates the configurations of the reference repository (microsoft/Swin-Transformer,
``configs/``); the names, and the ``.ms_*`` pretrained tags they accept, are timm's. The two
``window12_192`` models exist with ImageNet-22k heads only.
"""

from __future__ import annotations

import difflib
from typing import Any

from fastswin.models.config import SwinConfig

_TINY = {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)}
_SMALL = {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)}
_BASE = {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)}
_LARGE = {"embed_dim": 192, "depths": (2, 2, 18, 2), "num_heads": (6, 12, 24, 48)}
_TINY_C24 = {**_TINY, "num_heads": (4, 8, 16, 32)}
_FROM_12 = {"pretrained_window_sizes": (12, 12, 12, 6)}


def _variant(
    version: int, size: dict[str, Any], window: int, image: int, **extra: Any
) -> SwinConfig:
    values = {"version": version, "window_size": window, "image_size": image, **size, **extra}
    return SwinConfig(**values)


VARIANTS: dict[str, SwinConfig] = {
    "swin_tiny_patch4_window7_224": _variant(1, _TINY, 7, 224),
    "swin_small_patch4_window7_224": _variant(1, _SMALL, 7, 224),
    "swin_base_patch4_window7_224": _variant(1, _BASE, 7, 224),
    "swin_base_patch4_window12_384": _variant(1, _BASE, 12, 384),
    "swin_large_patch4_window7_224": _variant(1, _LARGE, 7, 224),
    "swin_large_patch4_window12_384": _variant(1, _LARGE, 12, 384),
    "swin_tiny_c24_patch4_window8_256": _variant(1, _TINY_C24, 8, 256),
    "swinv2_tiny_window8_256": _variant(2, _TINY, 8, 256),
    "swinv2_tiny_window16_256": _variant(2, _TINY, 16, 256),
    "swinv2_small_window8_256": _variant(2, _SMALL, 8, 256),
    "swinv2_small_window16_256": _variant(2, _SMALL, 16, 256),
    "swinv2_base_window8_256": _variant(2, _BASE, 8, 256),
    "swinv2_base_window16_256": _variant(2, _BASE, 16, 256),
    "swinv2_base_window12_192": _variant(2, _BASE, 12, 192, num_classes=21841),
    "swinv2_base_window12to16_192to256": _variant(2, _BASE, 16, 256, **_FROM_12),
    "swinv2_base_window12to24_192to384": _variant(2, _BASE, 24, 384, **_FROM_12),
    "swinv2_large_window12_192": _variant(2, _LARGE, 12, 192, num_classes=21841),
    "swinv2_large_window12to16_192to256": _variant(2, _LARGE, 16, 256, **_FROM_12),
    "swinv2_large_window12to24_192to384": _variant(2, _LARGE, 24, 384, **_FROM_12),
}


def find_variant(name: str) -> SwinConfig:
    """Configuration of a named variant; a timm tag after a dot (``.ms_in1k``) is ignored.

    Raises:
        ValueError: no such name; the message lists the nearest ones.
    """
    base = name.partition(".")[0]
    if base in VARIANTS:
        return VARIANTS[base]
    nearest = difflib.get_close_matches(base, VARIANTS, n=3, cutoff=0.3)
    hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
    raise ValueError(f"unknown model name {name!r}{hint} (see fastswin.models.list_models())")


def list_models() -> list[str]:
    """Names of all variants, sorted."""
    return sorted(VARIANTS)
