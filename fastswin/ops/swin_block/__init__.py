"""A whole Swin block as one operator; in one kernel where few windows meet a Hopper GPU."""

from fastswin.ops.swin_block.api import swin_block

__all__ = ["swin_block"]
