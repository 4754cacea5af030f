"""The whole MLP half of a block in one kernel."""

from fastswin.ops.mlp.api import mlp

__all__ = ["mlp"]
