"""The one exception of this package."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or does not fit; the message is one line."""
