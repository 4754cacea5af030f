"""Fused operators, usable alone in anybody's model; nothing here knows about models."""

from fastswin.ops.window_attention import window_attention, window_attention_partitioned

__all__ = ["window_attention", "window_attention_partitioned"]
