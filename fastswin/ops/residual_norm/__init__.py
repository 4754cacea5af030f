"""Residual add and LayerNorm in one pass, forward and backward: the seams of a block."""

from fastswin.ops.residual_norm.api import add_layer_norm, layer_norm_add, residual_add

__all__ = ["add_layer_norm", "layer_norm_add", "residual_add"]
