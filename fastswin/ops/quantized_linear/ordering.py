"""The order of output channels in which an 8-bit result leaves the tensor cores in one piece.

    of 16 channels, as 4 groups t of 2 pairs h:  natural (t, h), ordered (h, t)

A thread's sums are pairs of neighbouring columns, eight apart. With the rows of the weight in this
order two such pairs are four neighbouring channels: four bytes that are stored, or multiplied
again, as they stand. Otherwise every byte is stored by itself (128 stores of a thread for a tile
of 128 x 128, against 16), or exchanged between threads. Exact, and made once beside the weights.
"""

from __future__ import annotations

import torch

#: Channels that change places with each other.
GROUP = 16


def order_rows(t: torch.Tensor) -> torch.Tensor:
    """``[N, ...]`` of any dtype, N a multiple of 16, in the kernels' order; contiguous."""
    return _exchange(t, 4, 2)


def restore_rows(t: torch.Tensor) -> torch.Tensor:
    """What :func:`order_rows` was given."""
    return _exchange(t, 2, 4)


def why_not_ordered(N: int, parts: int) -> str | None:
    """Reason why rows of a weight cannot be ordered, None where they can.

    Args:
        N: output channels.
        parts: of the output with a step of their own.
    """
    if N % (GROUP * parts):
        return f"{N} channels in {parts} part(s) are no multiple of {GROUP} each"
    return None


def _exchange(t: torch.Tensor, first: int, second: int) -> torch.Tensor:
    bits = t.view(torch.uint8) if t.element_size() == 1 else t  # PyTorch copies few fp8 views
    seen = bits.unflatten(0, (len(t) // GROUP, first, second, 2))
    return seen.transpose(1, 2).flatten(0, 3).contiguous().view(t.dtype)
