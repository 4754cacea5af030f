"""Which stages of few rows run all their blocks in one kernel (ops/persistent_stage).

In the plan's words qkv, attention, proj and mlp are "persistent". V1 in half precision, where the
stage is built for few rows anyway (small_batch.py); what the kernel cannot hold keeps its separate
kernels, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastswin._triton.device import multiprocessor_count
from fastswin.engine.prepare import PreparedBlock
from fastswin.ops.persistent_stage.config import (
    PersistentStageConfig,
    StageShape,
    persistent_stage_blocker,
    why_no_persistent_stage,
)
from fastswin.ops.persistent_stage.packing import BlockWeights, PackedStage, pack_stage

#: By channels of the stage.
PersistentStages = Mapping[int, PersistentStageConfig]

#: What is to be measured.
CANDIDATES: PersistentStages = {384: PersistentStageConfig(), 512: PersistentStageConfig()}

#: The engine's.
PERSISTENT_STAGES: PersistentStages = {}

#: Layers that the kernel takes over, in the plan's words.
LAYERS = ("qkv", "attention", "proj", "mlp")


def choose_persistent(
    table: PersistentStages,
    choice: dict[str, str],
    reasons: dict[str, str],
    launch: dict[str, Any],
    shape: StageShape,
    device: torch.device,
) -> None:
    """Change one stage's words and tiles where the table has its channels and the kernel fits.

    Args:
        table: tiles by channels.
        choice, reasons, launch: the stage's, changed in place.
        shape: of the stage.
        device: that runs it.
    """
    config = table.get(shape.channels)
    if config is None or choice["attention"] == "reference":
        return
    blocker = why_no_persistent_stage(device) or persistent_stage_blocker(
        shape, config, multiprocessor_count(device)
    )
    if blocker is not None:
        reasons["persistent stage"] = blocker
        return
    for layer in (*LAYERS, "fc1", "fc2"):
        launch.pop(layer, None)
        reasons.pop(layer, None)
    choice |= dict.fromkeys(LAYERS, "persistent")
    reasons["persistent stage"] = f"{shape.rows} rows: all blocks in one kernel"
    launch["persistent"] = config


def pack_blocks(
    blocks: Sequence[PreparedBlock], shift_size: tuple[int, int], dtype: torch.dtype
) -> PackedStage:
    """A stage's weights as the kernel finds them; their biases are in the packed tables."""
    weights, tables = [], []
    for block in blocks:
        packed = BlockWeights(
            block.qkv.weight, block.qkv.bias, None, block.proj.weight, block.proj.bias,
            block.fc1.weight, block.fc1.bias, block.fc2.weight, block.fc2.bias,
            block.shifted and shift_size != (0, 0),
        )  # fmt: skip
        weights.append(packed)
        tables.append(block.bias_table(shift_size if block.shifted else (0, 0), dtype))
    return pack_stage(weights, tables)
