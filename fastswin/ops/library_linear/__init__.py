"""The CUDA library's matrix product with its own epilogues: bias, residual, fp8 in and out."""

from fastswin.ops.library_linear.api import library_linear, library_linear_blocker

__all__ = ["library_linear", "library_linear_blocker"]
