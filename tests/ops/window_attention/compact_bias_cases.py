"""Problems of attention on a compact bias table, with their oracle."""

from __future__ import annotations

import dataclasses

import torch
from attention_cases import Case, arguments, eager, oracle

from fastswin.ops.window_attention.config import WindowAttentionConfig
from fastswin.ops.window_attention.forward import window_attention_fwd
from fastswin.ops.window_attention.geometry import expand_bias_table
from fastswin.ops.window_attention.packing import (
    pack_bias,
    pack_compact_bias,
    pack_head_scale,
    shorten_compact_bias,
)

#: Tiles of keys for windows that would be held whole.
TILES = WindowAttentionConfig(64, (), 1, num_stages=2)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of ``ops.window_attention`` and the relative bias that its dense one is made of."""

    made: dict
    relative: torch.Tensor

    def compact_table(self, short: bool) -> torch.Tensor:
        table = pack_compact_bias(self.relative, self.made["window_size"])
        if not short:
            return table
        shortened = shorten_compact_bias(table)
        assert shortened is not None
        return shortened

    def dense_table(self) -> torch.Tensor:
        made = self.made
        return pack_bias(
            made["bias"], made["num_heads"], made["window_size"], made["shift_size"],
            made["qkv"].device,
        )  # fmt: skip

    def run(self, table: torch.Tensor, **changes) -> torch.Tensor:
        """What the launcher writes into NaN."""
        made, qkv = self.made, self.made["qkv"]
        out = torch.full((*qkv.shape[:3], qkv.shape[3] // 3), torch.nan, device=qkv.device)
        options = {"out": out.to(qkv.dtype)} | changes
        return window_attention_fwd(
            qkv, table, pack_head_scale(made.get("logit_scale")), made["qkv_bias"],
            (qkv.shape[3] // 3 // made["num_heads"]) ** -0.5, made["num_heads"],
            made["window_size"], made["shift_size"], False, **options,
        )  # fmt: skip

    def eager(self) -> torch.Tensor:
        return eager(self.made)

    def oracle(self) -> torch.Tensor:
        return oracle(self.made)


def make_problem(case: Case, randn, dtype: torch.dtype) -> Problem:
    """Every entry of the bias has a value of its own, between 0 and 16 as V2's."""
    made = arguments(case, randn, dtype)
    rows, cols = case.window_size
    entries = (2 * rows - 1) * (2 * cols - 1)
    relative = 16 * torch.sigmoid(randn(entries, case.num_heads))
    made["bias"] = expand_bias_table(relative, case.window_size)
    return Problem(made, relative)
