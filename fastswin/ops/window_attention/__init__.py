"""Shifted-window attention, V1 and V2: image order in, image order out."""

from fastswin.ops.window_attention.api import window_attention, window_attention_partitioned
from fastswin.ops.window_attention.quantized import quantized_window_attention

__all__ = ["quantized_window_attention", "window_attention", "window_attention_partitioned"]
