"""The whole MLP half of a block on 8-bit operands, in one kernel."""

from fastswin.ops.quantized_mlp.api import quantized_mlp

__all__ = ["quantized_mlp"]
