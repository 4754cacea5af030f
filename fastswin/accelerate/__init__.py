"""Fused operators inside a live Swin model of timm, torchvision, transformers or Microsoft's style.

``accelerate(model)`` changes the class of modules in place; parameters, buffers, keys and hooks on
the modules around stay the objects that they are. ``restore(model)`` changes it back.
"""

from fastswin.accelerate.api import accelerate, restore
from fastswin.accelerate.report import AccelerateReport

__all__ = ["AccelerateReport", "accelerate", "restore"]
