"""How merged rows are cut into programs; imports no Triton.

A merged row is two runs of memory: the two neighbours of the upper map row, ``2C`` channels side by
side, and the two of the lower one. Each run is held in two exact column parts where ``2C`` allows.
"""

from __future__ import annotations

from typing import NamedTuple

from fastswin._triton.tiles import cdiv
from fastswin.ops.residual_norm.config import (
    BACKWARD_PROGRAMS,
    column_parts,
    num_warps,
    rows_per_tile,
)

#: Channels of the map: a merged row has four times as many, and one program holds it whole.
MAX_CHANNELS = 2048


#: Values of a program that stores 8 bits: most of one warp, and most of several tokens.
QUANTIZED_WARP_VALUES, QUANTIZED_TILE_VALUES = 3072, 1536


class MergeTiles(NamedTuple):
    """A run of ``2C`` channels as columns CA + CB (CB 0: one part), BLOCK_M rows."""

    CA: int
    CB: int
    BLOCK_M: int
    num_warps: int


def merge_tiles(channels: int) -> MergeTiles:
    """Tiles of one program for a map of ``channels``."""
    return MergeTiles(
        *column_parts(2 * channels), rows_per_tile(4 * channels), num_warps(4 * channels)
    )


def quantized_merge_tiles(channels: int, tokens: int) -> MergeTiles:
    """Tiles of one program that stores 8 bits, for map rows of ``tokens`` merged tokens.

    One warp while a token is at most 96 values a thread; more tokens where they are small, as long
    as no more than an eighth of a map row is padding.
    """
    CA, CB = column_parts(2 * channels)
    warps = 1
    while 2 * (CA + CB) > QUANTIZED_WARP_VALUES * warps:
        warps *= 2
    block_m = 1
    while (
        2 * block_m * 2 * (CA + CB) <= QUANTIZED_TILE_VALUES
        and 8 * (cdiv(tokens, 2 * block_m) * 2 * block_m) <= 9 * tokens
    ):
        block_m *= 2
    return MergeTiles(CA, CB, block_m, warps)


def backward_programs(rows: int, tiles: MergeTiles) -> int:
    """Programs that share ``rows`` merged rows, a function of the shape only."""
    return min(cdiv(rows, tiles.BLOCK_M), BACKWARD_PROGRAMS)
