"""How the rows are cut into programs; imports no Triton."""

from __future__ import annotations

from fastswin._triton.tiles import cdiv, next_power_of_2, split_columns

#: Elements of one tile: 16 fp32 registers a thread and array over 4 warps.
TILE_ELEMENTS = 2048

#: Programs of the backward kernel, each with its own partial sums. A fixed number, not the card's
#: multiprocessors, so that the sums have the same order on every card; 3 for each of an H100's 132.
BACKWARD_PROGRAMS = 396

#: Partial sums of one column tile that the second stage holds at once. Each step waits for memory:
#: 396 rows in 4 steps of 64 bytes a row, where 13 steps of 32 rows took 6 us.
REDUCE_ROWS, REDUCE_COLUMNS = 128, 16


def column_parts(C: int) -> tuple[int, int]:
    """Two exact column parts (96 = 64 + 32), or one padded part and 0."""
    return split_columns(C) or (next_power_of_2(C), 0)


def rows_per_tile(C: int) -> int:
    return max(1, min(16, TILE_ELEMENTS // next_power_of_2(C)))


def num_warps(C: int) -> int:
    return 4 if C <= 2048 else 8


def backward_programs(M: int, C: int) -> int:
    """Programs that share ``M`` rows, a function of the shape only."""
    return min(cdiv(M, rows_per_tile(C)), BACKWARD_PROGRAMS)
