"""Modules that replace a step of somebody's own model."""

from fastswin.nn.window_softmax import WindowSoftmax

__all__ = ["WindowSoftmax"]
