"""Linear layers with their neighbours fused: LayerNorm in front, GELU or residual behind."""

from fastswin.ops.linear.api import linear

__all__ = ["linear"]
