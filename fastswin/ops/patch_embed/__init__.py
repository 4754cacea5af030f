"""Patch embedding and its LayerNorm in one kernel."""

from fastswin.ops.patch_embed.api import patch_embed

__all__ = ["patch_embed"]
