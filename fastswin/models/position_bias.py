"""V2's continuous relative position bias.

    table = 16 * sigmoid(mlp(coords))          [(2 Wh - 1) * (2 Ww - 1), nH]
    coords = sign(c) * log2(1 + |c|) / log2(8),   c = 8 * offset / (window - 1)

An MLP 2 -> 512 -> nH on log-spaced relative coordinates, so that one set of weights serves any
window. Source: Liu et al. 2022, section 3.3.
"""

from __future__ import annotations

import math

import torch
from torch import nn

Pair = tuple[int, int]

CPB_HIDDEN = 512


def log_spaced_coords(
    window_size: Pair, pretrained_window: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Log-spaced offsets ``[(2 Wh - 1) * (2 Ww - 1), 2]`` in fp32, row offset first.

    Args:
        window_size: window ``(Wh, Ww)`` in tokens.
        pretrained_window: window the MLP was trained with; 0 means ``window_size``.
        device: where to build them; a copy from the CPU could not be captured in a CUDA graph.
    """
    axes = []
    for side in window_size:
        offset = torch.arange(-(side - 1), side, dtype=torch.float32, device=device)
        # a window of one token has only offset 0; dividing by side - 1 would give NaN
        axes.append(offset / max((pretrained_window or side) - 1, 1) * 8.0)
    coords = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).view(-1, 2)
    return torch.sign(coords) * torch.log2(coords.abs() + 1.0) / math.log2(8)


class ContinuousPositionBias(nn.Sequential):
    """The bias MLP; its state-dict keys ``0.weight, 0.bias, 2.weight`` are the official ones."""

    def __init__(self, num_heads: int, window_size: Pair, pretrained_window: int) -> None:
        super().__init__(
            nn.Linear(2, CPB_HIDDEN), nn.ReLU(), nn.Linear(CPB_HIDDEN, num_heads, bias=False)
        )
        self.window_size = window_size
        self.pretrained_window = pretrained_window

    def table(self) -> torch.Tensor:
        """Bias table ``[(2 Wh - 1) * (2 Ww - 1), nH]`` in the parameters' dtype.

        Derived on every call from the parameters' dtype and device, so nothing can go stale.
        """
        first = self[0]
        assert isinstance(first, nn.Linear)
        weight = first.weight
        coords = log_spaced_coords(self.window_size, self.pretrained_window, weight.device)
        return 16 * torch.sigmoid(self(coords.to(weight.dtype)))
