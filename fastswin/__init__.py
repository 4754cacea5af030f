"""fastswin: Swin Transformers, fast on the GPU, with the same answers."""

from fastswin import models, ops
from fastswin.accelerate import accelerate, restore
from fastswin.engine import Engine

__version__ = "0.1.0"

__all__ = ["Engine", "__version__", "accelerate", "models", "ops", "restore"]
