"""A stage as a composition of PyTorch operations: what the kernel is tested against.

    x += proj(attention(qkv(norm(x))));   x += fc2(gelu(fc1(norm(x))))        per block

Each step rounds to x's dtype, as separate layers do; fp64 stays fp64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fastswin.ops.persistent_stage.packing import BlockWeights
from fastswin.ops.window_attention.reference import window_attention_ref

Pair = tuple[int, int]


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def persistent_stage_ref(
    x: torch.Tensor,
    blocks: Sequence[BlockWeights],
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    scale: float,
    eps: float,
) -> torch.Tensor:
    """See the public function."""
    dtype, C = x.dtype, x.shape[-1]
    compute = torch.promote_types(dtype, torch.float32)

    def norm(rows: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(rows.to(compute), (C,), eps=eps).to(dtype)

    for block in blocks:
        attended = window_attention_ref(
            _linear(norm(x), block.qkv_weight, block.qkv_bias), block.bias, num_heads,
            window_size, shift_size if block.shifted else (0, 0), scale, None, None,
        )  # fmt: skip
        x = x + _linear(attended, block.proj_weight, block.proj_bias)
        h = F.gelu(_linear(norm(x), block.fc1_weight, block.fc1_bias))
        x = x + _linear(h, block.fc2_weight, block.fc2_bias)
    return x
