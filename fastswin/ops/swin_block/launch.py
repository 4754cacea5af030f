"""Launcher of a block in clusters; what it needs is in config.py."""

from __future__ import annotations

from typing import Any

import torch

from fastswin._triton.cluster import launch_clusters
from fastswin._triton.device import HOPPER
from fastswin._triton.tensor_copy import describe
from fastswin.ops.swin_block.config import HEAD_DIM, live_threads, tail_bytes
from fastswin.ops.swin_block.packing import PackedBlock
from fastswin.ops.window_attention.geometry import num_windows
from fastswin.ops.window_attention.launch import check_grid
from fastswin.ops.window_attention.packing import LOG2_E

Pair = tuple[int, int]


def swin_block_fwd(
    x: torch.Tensor,
    weights: PackedBlock,
    table: torch.Tensor,
    head_scale: torch.Tensor | None,
    scale: float,
    window_size: Pair,
    shift_size: Pair,
    eps: float,
    out: torch.Tensor,
    pdl: bool = False,
) -> torch.Tensor:
    """A block on a contiguous, aligned ``x [B, H, W, C]`` that config.py takes.

    Args:
        weights: packed (packing.py); with norms and ``head_scale`` V2, without V1.
        table, head_scale: packed (ops/window_attention/packing.py).
        out: ``[B, H, W, C]``; may be ``x``.
    """
    from fastswin._triton.pdl import pdl_options
    from fastswin.ops.swin_block.kernel import _swin_block_kernel

    B, H, W, C = x.shape
    if x.numel() == 0:
        return out
    heads, tokens = C // HEAD_DIM, window_size[0] * window_size[1]
    per_col, per_row = num_windows((H, W), window_size)
    tail = tail_bytes(heads, tokens)
    constants: dict[str, Any] = {
        "P": heads, "N": tokens, "WH": window_size[0], "WW": window_size[1],
        "SH": shift_size[0], "SW": shift_size[1], "V2": head_scale is not None,
        "THREADS": live_threads(tokens), "TAIL": tail,
    }  # fmt: skip
    units = 4 * HEAD_DIM  # hidden units of a program
    windows = B * per_col * per_row
    check_grid(windows * heads)
    launch_clusters(
        _swin_block_kernel, windows, heads, tail,
        x, weights.qkv_bias, weights.proj_bias, weights.fc1_bias, weights.fc2_bias, table,
        x if head_scale is None else head_scale, *(weights.norm1 or (x, x)),
        *(weights.norm2 or (x, x)), out, describe(weights.heads, 4 * HEAD_DIM, HEAD_DIM),
        describe(weights.fc1, units, HEAD_DIM), describe(weights.fc2, HEAD_DIM, units),
        scale * LOG2_E, eps, H, W, per_col, per_row,
        **constants, num_warps=4, **pdl_options(pdl, HOPPER),
    )  # fmt: skip
    return out
