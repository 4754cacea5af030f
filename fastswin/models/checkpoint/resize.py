"""Position tables at another size: bicubic over the 2-D grid, per head.

The original repository's method: ``F.interpolate(mode="bicubic", align_corners=False)`` on the
``[2 Wh - 1, 2 Ww - 1]`` grid. It is not timm's geometric resampling, which gives other numbers.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F

from fastswin.models.checkpoint.errors import CheckpointError
from fastswin.models.checkpoint.windows import square_window, table_rows

Pair = tuple[int, int]

_logger = logging.getLogger(__name__)


def resize_bias_table(
    table: torch.Tensor,
    window_size: Pair,
    *,
    source_window: Pair | None = None,
    name: str = "table",
) -> torch.Tensor:
    """A bias table for another window.

    Args:
        table: ``[(2 Wh - 1) * (2 Ww - 1), nH]`` of the source window.
        window_size: target window ``(Wh, Ww)`` in tokens.
        source_window: the table's own window; None means square, told from the row count.
        name: what to call the table in messages.

    Returns:
        ``[(2 Wh' - 1) * (2 Ww' - 1), nH]`` in the table's dtype; the table itself when the
        windows are equal.

    Raises:
        CheckpointError: the source window is unknown (no perfect square) or does not fit.

    Source: microsoft/Swin-Transformer, ``load_pretrained``.
    """
    rows = table.shape[0]
    source = source_window or square_window(rows)
    if source is None:
        raise CheckpointError(
            f"{name} has {rows} rows, which fits no square window; its own window must be known "
            "(a relative_position_index beside it) to resize it"
        )
    if table_rows(source) != rows:
        raise CheckpointError(
            f"{name} has {rows} rows, but a window of {source[0]}x{source[1]} has "
            f"{table_rows(source)}"
        )
    if source == tuple(window_size):
        return table
    return _bicubic(
        table, (2 * source[0] - 1, 2 * source[1] - 1),
        (2 * window_size[0] - 1, 2 * window_size[1] - 1), name,
    )  # fmt: skip


def resize_position_embedding(
    embedding: torch.Tensor, map_size: Pair, *, name: str = "absolute_pos_embed"
) -> torch.Tensor:
    """An absolute position embedding ``[1, H * W, C]`` of a square map for ``map_size``."""
    side = round(embedding.shape[1] ** 0.5)
    if side * side != embedding.shape[1]:
        raise CheckpointError(
            f"{name} has {embedding.shape[1]} tokens, which is no square map; it cannot be resized"
        )
    return _bicubic(embedding[0], (side, side), map_size, name)[None]


def _bicubic(rows: torch.Tensor, source: Pair, target: Pair, name: str) -> torch.Tensor:
    """``[H * W, C]`` to ``[H' * W', C]``, computed in fp32."""
    grid = rows.float().reshape(1, *source, -1).permute(0, 3, 1, 2)
    out = F.interpolate(grid, size=target, mode="bicubic", align_corners=False)
    _logger.info("%s resized from %dx%d to %dx%d (bicubic)", name, *source, *target)
    return out[0].permute(1, 2, 0).reshape(target[0] * target[1], -1).to(rows.dtype)
