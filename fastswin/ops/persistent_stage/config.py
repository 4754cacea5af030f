"""How the phases of a persistent stage are cut, and which stages fit; imports no Triton.

``M`` rows, ``C`` channels. Numbers behind the choices: docs/performance.md.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from fastswin._triton.device import device_capability
from fastswin._triton.tiles import MIN_DOT, cdiv, next_power_of_2, split_columns, why_not_dot
from fastswin.ops.attention_half.config import column_parts

Pair = tuple[int, int]

#: Windows are one tile of rows.
MAX_TOKENS = 64

#: Head dims of the kernel, powers of two.
HEAD_DIMS = (16, 32, 64)

#: Shared memory that operands of one phase may take, of 227 KB.
OPERAND_BYTES = 200 * 1024

#: First compute capability: red and ld.acquire exist before, but the tiles are Hopper's.
MIN_CAPABILITY = (9, 0)


@dataclasses.dataclass(frozen=True)
class PersistentStageConfig:
    """Launch options.

    Attributes:
        proj, fc1, fc2: (rows, output channels) of a program's tile.
        splits: slices of fc2's K.
        num_warps: warps per program.
        prefetch: whether programs without a head ask the block's weights into L2.
    """

    proj: Pair = (16, 64)
    fc1: Pair = (32, 128)
    fc2: Pair = (32, 128)
    splits: int = 4
    num_warps: int = 4
    prefetch: bool = True


@dataclasses.dataclass(frozen=True)
class StageShape:
    """What a stage is made of.

    Attributes:
        batch, map_size: rows are ``batch * H * W``.
        channels, num_heads, hidden: of every block.
        window_size, shift_size: the shift is that of shifted blocks.
    """

    batch: int
    map_size: Pair
    channels: int
    num_heads: int
    hidden: int
    window_size: Pair
    shift_size: Pair = (0, 0)

    @property
    def rows(self) -> int:
        return self.batch * math.prod(self.map_size)

    @property
    def heads(self) -> int:
        """Heads of all windows."""
        return self.rows // math.prod(self.window_size) * self.num_heads


def norm_rows(M: int, multiprocessors: int) -> int:
    """Rows of a program in the phases that normalise."""
    return next_power_of_2(cdiv(M, multiprocessors))


def pieces(
    shape: StageShape, config: PersistentStageConfig, multiprocessors: int
) -> dict[str, int]:
    """Pieces of work by phase (phases.py), one for each program."""
    M = shape.rows

    def tiles(tile: Pair, columns: int) -> int:
        return cdiv(M, tile[0]) * (columns // tile[1])

    return {
        "norm": cdiv(M, norm_rows(M, multiprocessors)),
        "attend": shape.heads,
        "project": tiles(config.proj, shape.channels),
        "expand": tiles(config.fc1, shape.hidden),
        "shrink": tiles(config.fc2, shape.channels) * config.splits,
        "join": cdiv(M, norm_rows(M, multiprocessors)),
    }


def why_no_persistent_stage(device: torch.device) -> str | None:
    """Reason why a GPU cannot run the kernel, None where it can."""
    if device.type != "cuda" or device_capability(device) >= MIN_CAPABILITY:
        return None
    return "persistent stages need compute capability 9.0"


def persistent_stage_blocker(
    shape: StageShape, config: PersistentStageConfig, multiprocessors: int
) -> str | None:
    """Reason why a stage does not fit one program per multiprocessor, None where it does."""
    (H, W), (WH, WW), C = shape.map_size, shape.window_size, shape.channels
    if WH * WW > MAX_TOKENS:
        return f"{WH * WW} tokens a window exceed {MAX_TOKENS}"
    if H % WH or W % WW:
        return f"a map of {H}x{W} is no whole number of {WH}x{WW} windows"
    if C % shape.num_heads or C // shape.num_heads not in HEAD_DIMS:
        return f"{C} channels in {shape.num_heads} heads: head_dim must be one of {HEAD_DIMS}"
    if column_parts(C) is None:
        return f"{C} channels are not one or three times a power of two of at least {MIN_DOT}"
    slice_width = shape.hidden // config.splits
    for width in (C, slice_width):
        if split_columns(width) is None:
            return f"{width} channels are not one or two powers of two of at least {MIN_DOT}"
    if shape.hidden % config.splits:
        return f"splits must divide {shape.hidden} hidden channels, got {config.splits}"
    for name, tile, columns in (
        ("proj", config.proj, C), ("fc1", config.fc1, shape.hidden), ("fc2", config.fc2, C),
    ):  # fmt: skip
        if blocker := why_not_dot({f"rows of {name}": tile[0], f"columns of {name}": tile[1]}, {}):
            return blocker
        if columns % tile[1]:
            return f"{tile[1]} columns of {name} do not divide {columns}"
    head = (next_power_of_2(WH * WW) + 3 * C // shape.num_heads) * C
    tiles = ((config.proj, C), (config.fc1, C), (config.fc2, slice_width))
    bytes_held = 2 * max(head, *(sum(tile) * width for tile, width in tiles))
    if bytes_held > OPERAND_BYTES:
        return f"operands of {bytes_held} bytes exceed {OPERAND_BYTES}"
    for phase, count in pieces(shape, config, multiprocessors).items():
        if count > multiprocessors:
            return f"{phase} has {count} pieces, more than {multiprocessors} multiprocessors"
    return None
