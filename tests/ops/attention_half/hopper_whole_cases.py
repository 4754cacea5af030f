"""Problems of the Hopper form of the whole half, packed as its launcher takes them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hopper_heads_cases import EPS, TABLES, draw

from fastswin import ops
from fastswin.ops.attention_half.packing import pack_whole
from fastswin.ops.window_attention.packing import pack_bias, pack_head_scale

#: What is a vector or a table stays fp32 in eager.
WIDE = (*TABLES, "proj_bias", "norm_weight", "norm_bias")


@dataclasses.dataclass
class Problem:
    """Arguments of ``ops.attention_half``; the table in fp16 or fp32."""

    made: dict[str, Any]
    table: torch.dtype = torch.float16

    @property
    def norm_first(self) -> bool:
        return "norm_weight" not in self.made

    def packed(self) -> tuple[Any, ...]:
        """Arguments of ``hopper_whole_fwd`` up to ``norm_first``."""
        made = self.made
        heads, window, shift = made["num_heads"], made["window_size"], made["shift_size"]
        vectors = pack_whole(
            made["qkv_weight"], made["qkv_bias"], made["proj_bias"], made.get("norm_weight"),
            made.get("norm_bias"),
        )  # fmt: skip
        return (
            made["x"], made["qkv_weight"], vectors,
            pack_bias(made["bias"], heads, window, shift, made["x"].device, self.table),
            pack_head_scale(made.get("logit_scale")), made["proj_weight"], 32**-0.5, heads, window,
            shift, EPS, self.norm_first,
        )  # fmt: skip

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """Eager in ``dtype``; fp64 is the oracle."""
        made = {
            name: value.to(dtype)
            if isinstance(value, torch.Tensor) and (name not in WIDE or dtype == torch.float64)
            else value
            for name, value in self.made.items()
        }
        return ops.attention_half(
            **made, norm_first=self.norm_first, eps=EPS, impl="reference"
        )  # fmt: skip


def make_whole(
    *,
    batch: int = 1,
    windows: tuple[int, int] = (2, 2),
    window: tuple[int, int] = (7, 7),
    shift: tuple[int, int] = (3, 3),
    heads: int = 3,
    version: int = 1,
    dtype: torch.dtype = torch.float16,
    table: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
    offset: float = 1.0,
) -> Problem:
    """Every row with a mean and a deviation of its own."""
    made, randn = draw(batch, windows, window, shift, heads, dtype, device, offset)
    C = 32 * heads
    made |= {
        "bias": made["bias"].half().float(),
        "proj_weight": (1.5 * C**-0.5 * randn(C, C)).to(dtype),
        "proj_bias": 0.5 * randn(C),
    }
    if version == 2:
        made |= {
            "logit_scale": 1.5 + 0.5 * randn(heads),
            "norm_weight": 1 + 0.3 * randn(C),
            "norm_bias": randn(C),
        }
    return Problem(made, table)
