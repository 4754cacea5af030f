"""All blocks of a stage with few rows in one kernel that stays on the card."""

from fastswin.ops.persistent_stage.api import persistent_stage
from fastswin.ops.persistent_stage.packing import BlockWeights

__all__ = ["BlockWeights", "persistent_stage"]
