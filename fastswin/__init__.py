"""fastswin: Swin Transformers, fast on the GPU, with the same answers."""

from fastswin import models, ops

__version__ = "0.1.0"

__all__ = ["__version__", "models", "ops"]
