"""The window a checkpoint was trained with, from its tables and derived buffers.

The row count of a bias table is ``(2 Wh - 1) * (2 Ww - 1)``. It gives a square window only if it
is a perfect square, and not even then for sure: windows 2x14 and 5x5 both have 81 rows. The index
buffer tells the two sides apart wherever it was saved and fits the table.
"""

from __future__ import annotations

import math

import torch

from fastswin.models.checkpoint.layout import State

Pair = tuple[int, int]


def table_rows(window_size: Pair) -> int:
    """Rows of the bias table of a window."""
    return (2 * window_size[0] - 1) * (2 * window_size[1] - 1)


def square_window(rows: int) -> Pair | None:
    """The square window with that many table rows, None if there is none."""
    side = math.isqrt(rows)
    if side * side != rows or side % 2 == 0:
        return None
    return (side + 1) // 2, (side + 1) // 2


def index_window(index: torch.Tensor) -> Pair | None:
    """Window of a ``relative_position_index`` ``[N, N]`` or flat ``[N * N]``; None if unreadable.

    In its first row the index falls by 1 from column to column and by ``Ww`` at the row's end.
    """
    tokens = math.isqrt(index.numel())
    if tokens == 0 or tokens * tokens != index.numel() or index.is_meta:
        return None
    first = index.reshape(-1)[:tokens].long()
    ends = torch.nonzero(first[:-1] - first[1:] != 1)
    columns = int(ends[0]) + 1 if len(ends) else tokens
    return (tokens // columns, columns) if tokens % columns == 0 else None


def coords_window(coords: torch.Tensor) -> Pair:
    """Window of V2's ``relative_coords_table`` ``[1, 2 Wh - 1, 2 Ww - 1, 2]``."""
    return (coords.shape[-3] + 1) // 2, (coords.shape[-2] + 1) // 2


def coords_pretrained_window(coords: torch.Tensor) -> int:
    """Pretrained window behind a ``relative_coords_table``; 0 when it is the window itself.

    The largest entry is ``log2(1 + 8 (w - 1) / (p - 1)) / 3``, solved for ``p``.
    """
    side = max(coords_window(coords))
    if side == 1 or coords.is_meta:
        return 0
    ratio = (2.0 ** (3.0 * float(coords.float().max())) - 1.0) / 8.0
    pretrained = round(1 + (side - 1) / ratio)
    return 0 if pretrained == side else pretrained


def attention_window(state: State, stem: str) -> Pair | None:
    """Window of one attention layer, None if the checkpoint does not tell.

    Args:
        state: official names, buffers included.
        stem: ``layers.i.blocks.j.attn.``.
    """
    index = state.get(stem + "relative_position_index")
    from_index = None if index is None else index_window(index)
    table = state.get(stem + "relative_position_bias_table")
    if table is not None:
        if from_index is not None and table_rows(from_index) == table.shape[0]:
            return from_index
        return square_window(table.shape[0])  # a stale index does not count
    coords = state.get(stem + "relative_coords_table")
    if coords is not None and coords.ndim == 4:
        return coords_window(coords)
    return from_index
