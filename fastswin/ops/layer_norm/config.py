"""How rows are cut into programs; imports no Triton."""

from __future__ import annotations

from typing import NamedTuple

from fastswin._triton.tiles import cdiv, next_power_of_2, split_columns

#: Elements of one tile: 8 KB of fp32 registers over 4 warps keeps several loads in flight.
TILE_ELEMENTS = 2048

NUM_WARPS = 4

#: Columns that one warp reads at once, 8 of 2 bytes a thread. The sums of wider rows would cross
#: the warps of a program (15 barriers at 768 channels), so those get programs of one warp.
WARP_COLUMNS = 256

#: Widest column part of a row that one warp keeps in registers, and most elements of its tile.
MAX_WARP_COLUMNS, WARP_TILE_ELEMENTS = 1024, 4096

#: Programs that are enough for a card of 132 multiprocessors, of one warp and of four; with more
#: rows each takes more, since what a row costs is instructions: 208 of a warp at 192 channels in
#: int8 with 8 rows a program, 114 with 32 (20 and 11 us of 100,352 rows).
WARP_PROGRAMS, PROGRAMS = 3000, 1500

#: Most rows of a program of four warps.
MAX_BLOCK_M = 32


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


def narrow_tiles(channels: int, rows: int) -> tuple[RowTiles, int]:
    """Tiles and warps of a program for ``rows`` rows of ``channels`` elements stored in 8 bits.

    Predicted from instruction counts. Half-precision results keep :func:`row_tiles`: a Swin-T of
    batch 32 took 1.163 ms with these tiles, 1.138 before (H200, two runs).
    """
    tiles = row_tiles(channels)
    if not WARP_COLUMNS <= tiles.CA <= MAX_WARP_COLUMNS:
        block_m = tiles.BLOCK_M
        while tiles.CA < WARP_COLUMNS and 2 * block_m <= min(MAX_BLOCK_M, rows // PROGRAMS):
            block_m *= 2
        return tiles._replace(BLOCK_M=block_m), NUM_WARPS
    most = min(WARP_TILE_ELEMENTS // next_power_of_2(channels), rows // WARP_PROGRAMS)
    block_m = 1
    while 2 * block_m <= most:
        block_m *= 2
    return tiles._replace(BLOCK_M=block_m), 1


def num_programs(rows: int, tiles: RowTiles) -> int:
    """Programs of a launch, all in grid axis 0; ``rows`` may be a symbolic expression."""
    return cdiv(rows, tiles.BLOCK_M)
