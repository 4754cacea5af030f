"""How rows are cut into programs; imports no Triton."""

from __future__ import annotations

from typing import NamedTuple

from fastswin._triton.tiles import cdiv, next_power_of_2, split_columns

#: Elements of one tile: 8 KB of fp32 registers over 4 warps keeps several loads in flight.
TILE_ELEMENTS = 2048

NUM_WARPS = 4


class RowTiles(NamedTuple):
    """A row as columns CA + CB (CB 0: one part, padded where C is no such sum), BLOCK_M rows."""

    CA: int
    CB: int
    BLOCK_M: int


def row_tiles(channels: int) -> RowTiles:
    """Tiles of one program for rows of ``channels`` elements."""
    padded = next_power_of_2(channels)
    first, second = split_columns(channels) or (padded, 0)
    return RowTiles(first, second, max(1, min(16, TILE_ELEMENTS // padded)))


def num_programs(rows: int, tiles: RowTiles) -> int:
    """Programs of a launch, all in grid axis 0; ``rows`` may be a symbolic expression."""
    return cdiv(rows, tiles.BLOCK_M)
