"""Final LayerNorm and mean over tokens, with the classifier behind them."""

from fastswin.ops.pool.api import norm_pool, norm_pool_head

__all__ = ["norm_pool", "norm_pool_head"]
