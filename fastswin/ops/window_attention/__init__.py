"""Shifted-window attention, V1 and V2: image order in, image order out."""

from fastswin.ops.window_attention.api import window_attention, window_attention_partitioned

__all__ = ["window_attention", "window_attention_partitioned"]
