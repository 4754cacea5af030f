"""Compile what a training step of window attention launches for one GPU generation, as JSON lines.

A program of its own: Triton decides once per process whether kernels are interpreted. Tensors are
on the meta device, so real sizes cost no memory.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from unittest import mock

import torch

from fastswin.ops.window_attention import backward
from fastswin.ops.window_attention.backward_config import takes_whole_windows
from fastswin.ops.window_attention.backward_problem import Needs
from fastswin.ops.window_attention.config import padded_tokens
from fastswin.ops.window_attention.launch import Dropout
from fastswin.ops.window_attention.tables import pack_tables, table_gradient
from fastswin.testing.aot import compile_launch, record_launches

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch(
    window: int, dtype: torch.dtype, cosine: bool, head_dim: int = 32, heads: int = 4,
    tf32: bool = False, padded: bool = False, dropout: bool = False, config=None,
) -> None:  # fmt: skip
    """One backward at batch 32 of a shifted stage, four windows a side."""
    side = 4 * window - padded
    N, C = window * window, heads * head_dim
    qkv = empty(32, side, side, 3 * C, dtype=dtype)
    grad = empty(32, side, side, C, dtype=dtype)
    row_stats = out = None
    if config is not None or not takes_whole_windows(N, head_dim, dtype.itemsize):
        row_stats, out = empty(32 * 16, heads, N, 2, dtype=torch.float32), grad
    NP = padded_tokens(N)
    backward.window_attention_bwd(
        grad, qkv, out, row_stats, empty(4, heads, NP, NP, dtype=torch.float32),
        empty(heads, dtype=torch.float32) if cosine else None, empty(3 * C, dtype=torch.float32),
        head_dim**-0.5, heads, (window, window), (window // 2,) * 2, tf32,
        Needs(True, True, True, bias=True, logit_scale=cosine, pad=padded, qkv_sum=not padded),
        Dropout(empty(1, dtype=torch.int64), 0.1) if dropout else None, config,
    )  # fmt: skip


def record(dtype: str) -> list:
    """Launches of every window that ships, V1 and V2; padding, dropout and tf32 once each."""
    kind = DTYPES[dtype]
    with record_launches() as launches:
        for window in (7, 12):
            launch(window, kind, cosine=False)
        for window in (8, 12, 16, 24):
            launch(window, kind, cosine=True)
        launch(7, kind, cosine=False, padded=True, dropout=True)
        launch(7, kind, cosine=False, head_dim=64, heads=2)
        if dtype == "fp32":
            launch(7, kind, cosine=False, tf32=True)
        single, device = torch.float32, torch.device("meta")
        pack_tables(empty(4, 49, 49, dtype=single), None, 4, (7, 7), (3, 3), device)
        table = empty(169, 4, dtype=kind)
        pack_tables(table, None, 4, (7, 7), (3, 3), device)
        table_gradient(empty(66, 4, 64, 64, dtype=single), table, (7, 7))
    return launches


if __name__ == "__main__":
    target = int(sys.argv[1])
    capability = mock.Mock(return_value=divmod(target, 10))
    with mock.patch.object(backward, "device_capability", capability):
        recorded = record(sys.argv[2])
    part, parts = int(sys.argv[3]), int(sys.argv[4])
    for one in recorded[part::parts]:
        compiled = dataclasses.asdict(compile_launch(one, target))
        values = {k: v for k, v in one.arguments.items() if k.isupper() and isinstance(v, int)}
        print(json.dumps({**compiled, "constants": values, "options": one.options}), flush=True)
