"""Window order: which token of a map each place of a stream of windows holds.

The exported graph keeps its stream in the order of the windows of the coming block, ``[B, T, C]``
with ``T = nW * N``, so that roll, partition, reverse and roll back between two blocks become one
``Gather`` with a constant index, and a merging or the first partition needs none of its own.

    place (i, j, y, x)  holds  row = (i * Wh + y + Sh) mod (nWh * Wh),  column likewise

An order is int64 ``[T]``: row-major token of the map ``[H, W]``, or -1 where the map is padded.
"""

from __future__ import annotations

import torch

from fastswin.ops.window_attention.geometry import num_windows
from fastswin.ops.window_attention.reference import partition

Pair = tuple[int, int]


def image_order(map_size: Pair) -> torch.Tensor:
    """The order without windows: int64 ``[H * W]``, every token in its own place."""
    return torch.arange(map_size[0] * map_size[1])


def window_order(map_size: Pair, window_size: Pair, shift_size: Pair) -> torch.Tensor:
    """Order of the windows of one block.

    Args:
        map_size: token grid ``(H, W)``.
        window_size: window ``(Wh, Ww)``; a map that is no multiple is padded at its end.
        shift_size: cyclic shift ``(Sh, Sw)`` in tokens, after the padding.

    Returns:
        int64 ``[nW * N]``, -1 where padded.
    """
    rows, cols = (
        n * w for n, w in zip(num_windows(map_size, window_size), window_size, strict=True)
    )
    padded = torch.full((rows, cols), -1)
    padded[: map_size[0], : map_size[1]] = image_order(map_size).view(map_size)
    rolled = torch.roll(padded, (-shift_size[0], -shift_size[1]), dims=(0, 1))
    return partition(rolled.view(1, rows, cols, 1), window_size).flatten()


def transition(current: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor | None:
    """Index that brings a stream from one order into another of the same map.

    Args:
        current: order ``[T]`` of the stream.
        wanted: order ``[T']``; a padded place receives an arbitrary token, so the reader must
            blank it.

    Returns:
        int64 ``[T']`` into the stream's places; None where the orders are equal.
    """
    if torch.equal(current, wanted):
        return None
    return place_of(current)[wanted.clamp(min=0)]


def merging_order(map_size: Pair, merged: torch.Tensor) -> torch.Tensor:
    """The four neighbours of each merged token.

    Args:
        map_size: token grid ``(H, W)`` before the merging.
        merged: order ``[T']`` of the map ``[ceil(H / 2), ceil(W / 2)]`` after it.

    Returns:
        int64 ``[T', 4]``: (even row, even column), (odd, even), (even, odd), (odd, odd); -1 past
        the end of an odd side or where ``merged`` is padded.
    """
    H, W = map_size
    cols = (W + 1) // 2
    top, left = 2 * (merged // cols), 2 * (merged % cols)
    neighbours = []
    for right in (0, 1):
        for below in (0, 1):
            row, col = top + below, left + right
            outside = (row >= H) | (col >= W) | (merged < 0)
            neighbours.append(torch.where(outside, -1, row * W + col))
    return torch.stack(neighbours, dim=1)


def place_of(order: torch.Tensor) -> torch.Tensor:
    """Inverse of an order: int64 ``[H * W]``, where each token of the map is."""
    real = (order >= 0).nonzero().flatten()
    places = torch.empty(real.numel(), dtype=torch.int64)
    places[order[real]] = real
    return places
