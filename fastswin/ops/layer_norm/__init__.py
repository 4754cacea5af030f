"""LayerNorm over channels, with the residual add that follows it in V2."""

from fastswin.ops.layer_norm.api import layer_norm

__all__ = ["layer_norm"]
