"""Weights of the MLP in clusters, in the order in which its programs read them.

    fc1 [H, C], fc2 [C, H]   ->   tiles [P * tiles * 128, 64]

Each program has the tiles of its hidden units one behind the other: fc1's 64 channels at a time,
its first 128 units (a) and then the others (b); then fc2's, for each 128 output columns 64 hidden
units at a time. Of 64 others a tile holds two steps of channels:

    no others      a0 a1 a2 ...
    64 others      a0 a1 b01 a2 a3 b23 ...
    128 others     a0 b0 a1 b1 ...

Of every 32 channels the order is :func:`channel_order`'s. Tensor cores give a thread two
neighbouring channels of every 8. In this order what it has of 32 are eight neighbours of x, 16
bytes, which it reads, sends and stores at a time (exchange.py).
"""

from __future__ import annotations

import torch

from fastswin.ops.cluster_mlp.config import TILE_COLUMNS, TILE_ROWS


def channel_order(C: int) -> torch.Tensor:
    """Which channel stands at each place: of 32 channel ``8 q + 2 i + e`` at ``8 i + 2 q + e``."""
    return torch.arange(C).view(-1, 4, 4, 2).transpose(1, 2).flatten()


def pack_mlp(fc1_weight: torch.Tensor, fc2_weight: torch.Tensor, programs: int) -> torch.Tensor:
    """Tiles of all programs of a cluster.

    Args:
        fc1_weight, fc2_weight: ``[H, C]`` and ``[C, H]``.
        programs: of a cluster.
    """
    H, C = fc1_weight.shape
    order = channel_order(C).to(fc1_weight.device)
    fc1 = fc1_weight[:, order].view(programs, H // programs, C)
    fc2 = fc2_weight[order].view(C, programs, H // programs).transpose(0, 1)
    first, others = fc1[:, :TILE_ROWS], fc1[:, TILE_ROWS:]
    tiles = _by_columns(first)
    if others.shape[1]:
        both = TILE_ROWS // others.shape[1]  # steps in a tile of the others
        tiles = torch.cat(
            (
                tiles.reshape(programs, -1, both * TILE_ROWS, TILE_COLUMNS),
                _by_columns(others).reshape(programs, -1, TILE_ROWS, TILE_COLUMNS),
            ), 2
        )  # fmt: skip
    parts = [tiles]
    parts += [_by_columns(fc2[:, row : row + TILE_ROWS]) for row in range(0, C, TILE_ROWS)]
    flat = torch.cat([part.reshape(programs, -1, TILE_COLUMNS) for part in parts], 1)
    return flat.reshape(-1, TILE_COLUMNS).contiguous()


def _by_columns(weight: torch.Tensor) -> torch.Tensor:
    """``[P, rows, columns]`` as ``[P, columns / 64, rows, 64]``."""
    programs, rows, columns = weight.shape
    return weight.reshape(programs, rows, columns // TILE_COLUMNS, TILE_COLUMNS).transpose(1, 2)


def pack_offset(
    offset: torch.Tensor, fc2_bias: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is added to rows of x before an MLP, as its first product and its result take it.

    Args:
        offset, fc2_bias: ``[C]`` fp32.
        dtype: of x.

    Returns:
        The offset in x's type, and fc2's bias with it.
    """
    return offset.to(dtype).contiguous(), fc2_bias + offset
