"""Fused operators, usable alone in anybody's model; nothing here knows about models."""

from fastswin.ops.layer_norm import layer_norm
from fastswin.ops.linear import linear
from fastswin.ops.mlp import mlp
from fastswin.ops.patch_embed import patch_embed
from fastswin.ops.patch_merging import gather_neighbours
from fastswin.ops.pool import norm_pool
from fastswin.ops.window_attention import window_attention, window_attention_partitioned

__all__ = [
    "gather_neighbours",
    "layer_norm",
    "linear",
    "mlp",
    "norm_pool",
    "patch_embed",
    "window_attention",
    "window_attention_partitioned",
]
