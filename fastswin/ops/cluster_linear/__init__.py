"""Products of few rows on Hopper, K cut across the programs of a cluster."""

from fastswin.ops.cluster_linear.api import linear_post_norm

__all__ = ["linear_post_norm"]
