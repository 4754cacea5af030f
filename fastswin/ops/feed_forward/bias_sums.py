"""Bias gradient from one row of sums per row tile: added up in two steps, in a fixed order.

    partial [tiles, hidden]  ->  [GROUPS, hidden]  ->  [hidden], all fp32

One step would leave a stage-1 map's 3,136 rows to hidden / 64 = 6 programs.
"""

from __future__ import annotations

import torch

from fastswin._triton.tiles import cdiv

#: Row g of the first step's result is the sum of rows g, g + GROUPS, g + 2 GROUPS, ...
GROUPS = 32


def bias_partials(tiles: int, hidden: int, like: torch.Tensor) -> torch.Tensor:
    """``[rows, hidden]`` for ``tiles`` row tiles to fill, ``rows`` a multiple of the groups."""
    rows = cdiv(tiles, GROUPS) * GROUPS
    partial = like.new_empty(rows, hidden, dtype=torch.float32)
    if rows > tiles:
        partial[tiles:].zero_()
    return partial


def sum_bias_partials(partial: torch.Tensor, out: torch.Tensor) -> None:
    """Add up :func:`bias_partials` into ``out [hidden]``."""
    from fastswin.ops.residual_norm.backward import sum_partials

    hidden = partial.shape[1]
    if partial.shape[0] > GROUPS:
        groups = partial.new_empty(GROUPS * hidden)
        sum_partials(partial.view(-1, 1, GROUPS * hidden), [groups])
        partial = groups
    sum_partials(partial.view(GROUPS, 1, hidden), [out])
