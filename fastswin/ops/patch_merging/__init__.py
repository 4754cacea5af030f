"""The gather (and LayerNorm) in front of patch merging's projection."""

from fastswin.ops.patch_merging.api import (
    gather_layer_norm,
    gather_layer_norm_linear,
    gather_neighbours,
    merge_neighbours,
)

__all__ = [
    "gather_layer_norm",
    "gather_layer_norm_linear",
    "gather_neighbours",
    "merge_neighbours",
]
