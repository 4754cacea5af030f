"""The two linear layers of a block's MLP for training, GELU recomputed in the backward."""

from fastswin.ops.feed_forward.api import feed_forward

__all__ = ["feed_forward"]
