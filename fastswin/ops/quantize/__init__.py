"""Rounding to 8 bits: with given steps, or with one step a token found on the way."""

from fastswin.ops.quantize.api import quantize, quantize_per_token

__all__ = ["quantize", "quantize_per_token"]
