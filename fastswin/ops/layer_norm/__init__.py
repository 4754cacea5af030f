"""LayerNorm over channels, with the residual add that follows it in V2, or rounding to 8 bits."""

from fastswin.ops.layer_norm.api import layer_norm, layer_norm_per_token

__all__ = ["layer_norm", "layer_norm_per_token"]
