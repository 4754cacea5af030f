"""Fused operators inside a live Swin model of timm, torchvision, transformers or Microsoft's style.

``accelerate(model)`` changes the class of modules in place; parameters, buffers, keys and hooks on
the modules around stay the objects that they are. ``restore(model)`` changes it back;
``capture_training`` replays the steps of a model from CUDA graphs.
"""

from fastswin.accelerate.api import accelerate, restore
from fastswin.accelerate.capture import CapturedTraining, capture_training
from fastswin.accelerate.report import AccelerateReport

__all__ = ["AccelerateReport", "CapturedTraining", "accelerate", "capture_training", "restore"]
