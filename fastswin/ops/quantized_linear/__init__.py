"""Linear layers on 8-bit operands, with everything around the product in their epilogue."""

from fastswin.ops.quantized_linear.api import quantized_linear

__all__ = ["quantized_linear"]
