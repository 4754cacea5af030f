"""Problems of the Hopper form by heads, packed as the engine has them, with their oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fastswin import ops
from fastswin.ops.attention_half.packing import pack_projection
from fastswin.ops.linear.stats import write_stats_ref
from fastswin.ops.window_attention.packing import pack_bias, pack_head_scale

EPS = 1e-5

#: What is a table stays fp32 in eager.
TABLES = ("bias", "logit_scale", "qkv_bias")


@dataclasses.dataclass
class Problem:
    """Arguments of ``ops.attention_half``, and parts of a row that have statistics of their own."""

    made: dict[str, Any]
    parts: int | None

    def packed(self) -> tuple[Any, ...]:
        """Those of ``hopper_heads_fwd`` up to ``eps``."""
        made = self.made
        heads, window, shift = made["num_heads"], made["window_size"], made["shift_size"]
        return (
            made["x"], made["qkv_weight"],
            pack_projection(made["qkv_weight"], made["qkv_bias"], None),
            pack_bias(made["bias"], heads, window, shift, made["x"].device),
            pack_head_scale(made.get("logit_scale")), 32**-0.5, heads, window, shift,
            None if self.parts is None else EPS,
        )  # fmt: skip

    def statistics(self) -> torch.Tensor | None:
        x = self.made["x"]
        if self.parts is None:
            return None
        stats = torch.empty(2, self.parts, x.shape[:-1].numel(), device=x.device)
        write_stats_ref(x, stats)
        return stats

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """Eager in ``dtype``; fp64 is the oracle."""
        made = {
            name: value.to(dtype)
            if isinstance(value, torch.Tensor) and (name not in TABLES or dtype == torch.float64)
            else value
            for name, value in self.made.items()
        }
        return ops.attention_half(**made, norm_first=self.parts is not None, eps=EPS,
                                  impl="reference")  # fmt: skip


def draw(
    batch: int,
    windows: tuple[int, int],
    window: tuple[int, int],
    shift: tuple[int, int],
    heads: int,
    dtype: torch.dtype,
    device: torch.device | str,
    offset: float,
) -> tuple[dict, Callable[..., torch.Tensor]]:
    """Rows, qkv and bias of a half, and what draws more of it."""
    torch.manual_seed(heads + 10 * batch)
    C, tokens = 32 * heads, window[0] * window[1]
    H, W = windows[0] * window[0], windows[1] * window[1]

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(device)

    own = torch.arange(batch * H * W, device=device).view(batch, H, W, 1)
    made = {
        "x": (randn(batch, H, W, C) * (1 + own % 7 / 4) + own % 5 + offset).to(dtype),
        "qkv_weight": (1.5 * C**-0.5 * randn(3 * C, C)).to(dtype),
        "qkv_bias": 0.5 * randn(3 * C),
        "num_heads": heads,
        "window_size": window,
        "shift_size": shift,
        "bias": randn(heads, tokens, tokens),
    }
    return made, randn


def make_problem(
    *,
    batch: int = 1,
    windows: tuple[int, int] = (2, 2),
    window: tuple[int, int] = (7, 7),
    shift: tuple[int, int] = (3, 3),
    heads: int = 4,
    version: int = 1,
    parts: int = 1,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
    offset: float = 1.0,
) -> Problem:
    """Every row with a mean and a deviation of its own; V2 without a norm in front."""
    made, randn = draw(batch, windows, window, shift, heads, dtype, device, offset)
    if version == 2:
        return Problem(made | {"logit_scale": 1.5 + 0.5 * randn(heads)}, None)
    return Problem(made, parts)
