"""Launcher of attention of few long windows on Hopper (forward_hopper.py)."""

from __future__ import annotations

import torch

from fastswin._triton.device import HOPPER
from fastswin._triton.launch import launch
from fastswin._triton.tensor_copy import describe
from fastswin.ops.window_attention.config import padded_tokens
from fastswin.ops.window_attention.geometry import num_windows
from fastswin.ops.window_attention.hopper_config import REGISTERS, hopper_attention_blocker
from fastswin.ops.window_attention.launch import check_grid
from fastswin.ops.window_attention.packing import LOG2_E

Pair = tuple[int, int]


def hopper_attention_fwd(
    qkv: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Attention of a contiguous, aligned ``qkv [B, H, W, 3C]`` on a packed table.

    Raises:
        ValueError: a shape that the kernel does not take.
    """
    from fastswin._triton.pdl import pdl_options
    from fastswin.ops.window_attention.forward_hopper import _hopper_attention_kernel

    B, H, W, channels = qkv.shape
    C = channels // 3
    blocker = hopper_attention_blocker(C, num_heads, window_size, (H, W))
    if blocker is not None:
        raise ValueError(f"qkv does not fit: {blocker}")
    if out is None:
        out = qkv.new_empty(B, H, W, C)
    if B == 0:
        return out
    tokens = window_size[0] * window_size[1]
    rows, cols = num_windows((H, W), window_size)
    programs = B * rows * cols * num_heads
    check_grid(programs)
    NP = padded_tokens(tokens)
    rows_of_keys = table.view(-1, NP)
    launch(
        _hopper_attention_kernel, programs, qkv, describe(rows_of_keys, 64, 64),
        describe(rows_of_keys, 64, NP - 128), out, scale * LOG2_E, H, W, rows, cols,
        C=C, NH=num_heads, N=tokens, NP=NP, WH=window_size[0],
        WW=window_size[1], SH=shift_size[0], SW=shift_size[1], REGISTERS=REGISTERS, num_warps=4,
        **pdl_options(pdl, HOPPER),
    )  # fmt: skip
    return out
