"""Launcher of the form by heads on Hopper; what it needs is in config.py (hopper_heads_blocker)."""

from __future__ import annotations

import torch

from fastswin._triton.device import HOPPER
from fastswin._triton.launch import launch
from fastswin._triton.tensor_copy import describe
from fastswin.ops.attention_half.config import hopper_heads_steps
from fastswin.ops.window_attention.geometry import num_windows
from fastswin.ops.window_attention.launch import check_grid
from fastswin.ops.window_attention.packing import LOG2_E

Pair = tuple[int, int]


def hopper_heads_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    vectors: torch.Tensor,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    scale: float,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    eps: float | None,
    pdl: bool = False,
    norm_stats: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch on a contiguous, aligned ``x [B, H, W, C]``; ``vectors``, ``bias`` are packed.

    ``eps`` None means no LayerNorm (V2), otherwise ``norm_stats`` are those of x's rows.
    """
    from fastswin._triton.pdl import pdl_options
    from fastswin.ops.attention_half.hopper_heads import _hopper_heads_kernel

    B, H, W, C = x.shape
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    rows, cols = num_windows((H, W), window_size)
    programs = B * rows * cols * num_heads
    width = next(channels for channels in (256, 128, 64) if C % channels == 0)
    span, slots = hopper_heads_steps(C)
    check_grid(programs)
    if (eps is None) != (norm_stats is None):
        raise ValueError("give eps and norm_stats together or not at all")
    launch(
        _hopper_heads_kernel, programs, x, describe(weight, 32, width), vectors, bias,
        vectors if head_scale is None else head_scale, out,
        vectors if norm_stats is None else norm_stats, scale * LOG2_E,
        0.0 if eps is None else eps, H, W, rows, cols, B * H * W,
        C=C, NH=num_heads, N=window_size[0] * window_size[1], WH=window_size[0],
        WW=window_size[1], SH=shift_size[0], SW=shift_size[1], COSINE=head_scale is not None,
        PARTS=0 if norm_stats is None else norm_stats.shape[1],
        SPAN=span, SLOTS=slots, num_warps=4, **pdl_options(pdl, HOPPER),
    )  # fmt: skip
    return out
