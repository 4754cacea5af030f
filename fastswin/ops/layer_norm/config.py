"""How rows are cut into programs; imports no Triton."""

from __future__ import annotations

from typing import NamedTuple

from fastswin._triton.tiles import cdiv, next_power_of_2, split_columns

#: Elements of one tile: 8 KB of fp32 registers over 4 warps keeps several loads in flight.
TILE_ELEMENTS = 2048

NUM_WARPS = 4

#: Columns that one warp reads at once, 8 of 2 bytes a thread: the sums of wider rows would cross the
#: warps of a program, at 15 barriers for 768 channels. One warp to a program has none.
WARP_COLUMNS = 256

#: Widest column part of a row that one warp keeps in registers.
MAX_WARP_COLUMNS = 1024

#: Fewest rows that fill a card with two of them to a warp: 24 warps on each of 132 multiprocessors.
MANY_ROWS = 6000


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


def launch_tiles(channels: int, rows: int) -> tuple[RowTiles, int]:
    """Tiles and warps of a program for ``rows`` rows of ``channels`` elements."""
    tiles = row_tiles(channels)
    if not WARP_COLUMNS < tiles.CA <= MAX_WARP_COLUMNS:
        return tiles, NUM_WARPS
    two = rows >= MANY_ROWS and tiles.CA + tiles.CB <= MAX_WARP_COLUMNS
    return tiles._replace(BLOCK_M=2 if two else 1), 1


def num_programs(rows: int, tiles: RowTiles) -> int:
    """Programs of a launch, all in grid axis 0; ``rows`` may be a symbolic expression."""
    return cdiv(rows, tiles.BLOCK_M)
