"""A linear layer onto the residual stream and the LayerNorm that reads the stream next."""

from fastswin.ops.linear_norm.api import NormedRows, linear_add_layer_norm

__all__ = ["NormedRows", "linear_add_layer_norm"]
