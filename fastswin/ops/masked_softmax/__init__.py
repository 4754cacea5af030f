"""Masked softmax: ``softmax(scale * x + bias + mask)``, forward and backward, and named forms."""

from fastswin.ops.masked_softmax.api import (
    grouped_tril_softmax,
    masked_softmax,
    masked_softmax_,
    scaled_masked_softmax,
    window_softmax,
)

__all__ = [
    "grouped_tril_softmax",
    "masked_softmax",
    "masked_softmax_",
    "scaled_masked_softmax",
    "window_softmax",
]
