"""Final LayerNorm and mean over tokens."""

from fastswin.ops.pool.api import norm_pool

__all__ = ["norm_pool"]
