"""Replayable attention dropout: which weight is dropped is a function of a seed and its place.

    u(window, head, query, key) = philox4x32-10(seed; query * 65536 + key, window, head, 0)[0] >> 8
    kept where u >= round(p * 2**24), and divided by 1 - p

with windows counted over the batch. So the backward draws again what the forward drew, in any
order of tiles, and nothing is stored but the seed. The seed lives in a tensor on the device: it is
drawn from torch's generator there without a synchronisation, also inside a CUDA graph.
Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_ROUNDS = 10


def make_seed(seed: int | None, device: torch.device) -> torch.Tensor:
    """``[1]`` int64 on ``device``: the given seed, or one drawn from the device's generator."""
    if seed is None:
        return torch.randint(2**62, (1,), device=device)
    return torch.full((1,), seed & (2**63 - 1), dtype=torch.int64, device=device)


def drop_threshold(dropout_p: float) -> int:
    """Numbers of 24 bits below this drop their weight."""
    return round(dropout_p * 2**24)


def dropout_weights(
    seed: torch.Tensor, dropout_p: float, windows: int, heads: int, tokens: int
) -> torch.Tensor:
    """fp32 ``[windows, heads, tokens, tokens]``: 0 where dropped, else ``1 / (1 - p)``."""
    device = seed.device

    def counter(size: int, axis: int, step: int = 1) -> torch.Tensor:
        shape = [1, 1, 1, 1]
        shape[axis] = size
        return torch.arange(0, size * step, step, device=device).view(shape)

    pair = counter(tokens, 2, 65536) + counter(tokens, 3)
    drawn = _philox(seed, pair, counter(windows, 0), counter(heads, 1))
    return ((drawn >> 8) >= drop_threshold(dropout_p)).float() / (1.0 - dropout_p)


def _philox(
    seed: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor
) -> torch.Tensor:
    """First word of Philox4x32-10; 32-bit words in int64, whose products wrap at 64 bits."""
    c3 = torch.zeros_like(seed)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(_ROUNDS):
        b, a = _ROUND_B * c2, _ROUND_A * c0
        c0, c2 = ((b >> 32) & _LOW) ^ c1 ^ k0, ((a >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = b & _LOW, a & _LOW
        k0, k1 = (k0 + _KEY_A) & _LOW, (k1 + _KEY_B) & _LOW
    return c0
