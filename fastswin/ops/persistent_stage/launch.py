"""Launchers of the persistent stage: the whole, and phase by phase."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fastswin._triton.available import interpreting
from fastswin._triton.device import multiprocessor_count, on_device
from fastswin._triton.launch import on_grid
from fastswin._triton.tiles import split_columns
from fastswin.ops.attention_half.config import column_parts
from fastswin.ops.persistent_stage.config import (
    PersistentStageConfig,
    StageShape,
    norm_rows,
    persistent_stage_blocker,
    pieces,
)
from fastswin.ops.persistent_stage.packing import PackedStage
from fastswin.ops.window_attention.config import padded_tokens
from fastswin.ops.window_attention.packing import LOG2_E

#: Phases of a block in their order; "norm" stands before the first block.
PHASES = ("attend", "project", "expand", "shrink", "join")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything of a launch but the blocks and the phases.

    Attributes:
        arguments: of the kernel, up to the blocks.
        constants: by name, and the number of warps.
        work: pieces of work by phase.
        packed: the blocks' weights; the kernel has their addresses only.
    """

    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    work: dict[str, int]
    packed: PackedStage

    def launch(self, phase: str = "all", block: int | None = None) -> None:
        """One launch: of one phase of one block, or with barriers of all blocks."""
        from fastswin.ops.persistent_stage.kernel import _persistent_stage_kernel

        if block is None:
            programs, blocks = max(self.work.values()), (0, self.packed.depth)
            options = {"SYNC": True, "launch_cooperative_grid": True}
        else:
            programs, blocks = self.work[phase], (block, block + 1)
            options = {"SYNC": False}
        with on_device(self.arguments[0].device):
            on_grid(_persistent_stage_kernel, (programs,))(
                *self.arguments, *blocks, **self.constants, ONLY=phase, **options
            )


def prepare_launch(
    x: torch.Tensor,
    packed: PackedStage,
    shape: StageShape,
    scale: float,
    eps: float,
    config: PersistentStageConfig | None = None,
) -> Prepared:
    """Check, and allocate what the phases hand to each other.

    Args:
        x: contiguous ``[B, H, W, C]``, updated in place.
        packed: the blocks' weights.
        shape: of the stage.
        scale: of the scores.
        eps: of the LayerNorms.
        config: tiles; None takes the default.

    Raises:
        ValueError: the stage does not fit the GPU; the message says why.
    """
    config = PersistentStageConfig() if config is None else config
    processors = multiprocessor_count(x.device)
    blocker = persistent_stage_blocker(shape, config, processors)
    if blocker is not None:
        raise ValueError(f"config does not fit: {blocker}")
    M, C = shape.rows, shape.channels
    columns, slices = split_columns(C), split_columns(shape.hidden // config.splits)
    assert columns is not None  # persistent_stage_blocker was asked
    assert slices is not None
    parts = column_parts(C)
    assert parts is not None
    wide: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    n, o = torch.empty_like(x), torch.empty_like(x)
    h = torch.empty(M, shape.hidden, dtype=x.dtype, device=x.device)
    stats = torch.empty(2, C // config.proj[1], M, **wide)
    partials = torch.empty(config.splits, M, C, **wide)
    counter = torch.zeros(1, dtype=torch.int32, device=x.device)
    work = pieces(shape, config, processors)
    N = shape.window_size[0] * shape.window_size[1]
    constants: dict[str, Any] = {
        "M": M, "C": C, "CA": columns[0], "CB": columns[1], "HIDDEN": shape.hidden,
        "NH": shape.num_heads, "H": shape.map_size[0], "W": shape.map_size[1],
        "WH": shape.window_size[0], "WW": shape.window_size[1], "SH": shape.shift_size[0],
        "SW": shape.shift_size[1], "NP": padded_tokens(N), "SLICES": config.splits,
        "SA": slices[0], "SB": slices[1], "PROJ_ROWS": config.proj[0],
        "PROJ_COLUMNS": config.proj[1], "FC1_ROWS": config.fc1[0], "FC1_COLUMNS": config.fc1[1],
        "FC2_ROWS": config.fc2[0], "FC2_COLUMNS": config.fc2[1],
        "WIDTH": parts[0], "THREE": parts[1] == 3,
        "NORM_ROWS": norm_rows(M, processors), "PROGRAMS": max(work.values()),
        "PREFETCH": config.prefetch and not interpreting(), "num_warps": config.num_warps,
    }  # fmt: skip
    arguments = (
        x, n, o, stats, h, partials, packed.addresses, counter, packed.table, scale * LOG2_E, eps,
    )  # fmt: skip
    return Prepared(arguments, constants, work, packed)


def persistent_stage_fwd(
    x: torch.Tensor,
    packed: PackedStage,
    shape: StageShape,
    scale: float,
    eps: float,
    config: PersistentStageConfig | None = None,
    apart: bool = False,
) -> torch.Tensor:
    """Run all blocks on ``x``, in place; ``apart`` phase by phase, as the interpreter has to.

    The other arguments and errors are those of :func:`prepare_launch`.
    """
    if x.numel() == 0:
        return x
    prepared = prepare_launch(x, packed, shape, scale, eps, config)
    if not (apart or interpreting()):
        prepared.launch()
        return x
    prepared.launch("norm", 0)
    for block in range(packed.depth):
        for phase in PHASES:
            prepared.launch(phase, block)
    return x
