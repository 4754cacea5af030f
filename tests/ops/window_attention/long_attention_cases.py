"""Problems of attention of few long windows, packed as the engine has them, with their oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fastswin import ops
from fastswin.ops.window_attention.packing import pack_bias


@dataclasses.dataclass
class Problem:
    """Arguments of ``ops.window_attention``."""

    made: dict[str, Any]

    def packed(self, half_table: bool = True) -> tuple[Any, ...]:
        """Those of ``hopper_attention_fwd``."""
        made = self.made
        heads, window, shift = made["num_heads"], made["window_size"], made["shift_size"]
        table = pack_bias(made["bias"], heads, window, shift, made["qkv"].device)
        if half_table:
            table = table.to(made["qkv"].dtype)
        return made["qkv"], table, 32**-0.5, heads, window, shift

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """Eager in ``dtype``; fp64 is the oracle."""
        bias = self.made["bias"]
        made = self.made | {
            "qkv": self.made["qkv"].to(dtype),
            "bias": bias.to(dtype) if dtype == torch.float64 else bias,
        }
        return ops.window_attention(**made, impl="reference")


def make_problem(
    *,
    batch: int = 1,
    windows: tuple[int, int] = (2, 2),
    window: tuple[int, int] = (12, 12),
    shift: tuple[int, int] = (6, 6),
    heads: int = 2,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
) -> Problem:
    """Every token with values of its own; a bias that the half-precision table holds exactly."""
    torch.manual_seed(heads + 10 * batch)
    tokens, H, W = window[0] * window[1], windows[0] * window[0], windows[1] * window[1]
    qkv = 1.5 * torch.randn(batch, H, W, 3 * 32 * heads)
    bias = torch.randn(heads, tokens, tokens)
    return Problem(
        {
            "qkv": qkv.to(device, dtype), "num_heads": heads, "window_size": window,
            "shift_size": shift, "bias": bias.to(device),
        }
    )  # fmt: skip
