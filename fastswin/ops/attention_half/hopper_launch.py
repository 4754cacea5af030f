"""Launchers of the forms on Hopper; what they need is in hopper_config.py."""

from __future__ import annotations

import torch

from fastswin._triton.device import HOPPER, multiprocessor_count
from fastswin._triton.launch import launch
from fastswin._triton.tensor_copy import describe
from fastswin._triton.tiles import cdiv, next_power_of_2
from fastswin.ops.attention_half.hopper_config import (
    HOPPER_WHOLE_WIDTH,
    WINDOWS_REGISTERS,
    HopperWholeConfig,
    HopperWindowsConfig,
    default_hopper_whole_config,
    default_hopper_windows_config,
    hopper_heads_steps,
)
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
        **_geometry(C, num_heads, window_size, shift_size, head_scale),
        PARTS=0 if norm_stats is None else norm_stats.shape[1],
        SPAN=span, SLOTS=slots, num_warps=4, **pdl_options(pdl, HOPPER),
    )  # fmt: skip
    return out


def hopper_windows_fwd(
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
    config: HopperWindowsConfig | None = None,
) -> torch.Tensor:
    """As :func:`hopper_heads_fwd`, with several windows a program (hopper_windows.py).

    ``eps`` without ``norm_stats`` computes them. ``config`` None takes the heuristic.
    """
    from fastswin._triton.pdl import pdl_options
    from fastswin.ops.attention_half.hopper_windows import _hopper_windows_kernel

    B, H, W, C = x.shape
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    rows, cols = num_windows((H, W), window_size)
    windows = B * rows * cols
    if config is None:
        config = default_hopper_windows_config(C, windows, multiprocessor_count(x.device))
    programs = num_heads * cdiv(windows, config.windows)
    check_grid(programs)
    if eps is None and norm_stats is not None:
        raise ValueError("norm_stats needs eps")
    launch(
        _hopper_windows_kernel, programs, x, describe(weight, 32, 64), vectors, bias,
        vectors if head_scale is None else head_scale, out,
        vectors if norm_stats is None else norm_stats, scale * LOG2_E,
        0.0 if eps is None else eps, H, W, rows, cols, B * H * W, windows, config.windows,
        **_geometry(C, num_heads, window_size, shift_size, head_scale),
        NORMALIZE=eps is not None, PARTS=0 if norm_stats is None else norm_stats.shape[1],
        GROUPS=config.groups, BUFFERS=config.buffers, LOOP=config.windows > config.groups,
        REGISTERS=WINDOWS_REGISTERS[config.groups],
        num_warps=4, **pdl_options(pdl, HOPPER),
    )  # fmt: skip
    return out


def hopper_whole_fwd(
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    vectors: torch.Tensor,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    proj_weight: torch.Tensor,
    scale: float,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    eps: float,
    norm_first: bool,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    config: HopperWholeConfig | None = None,
) -> torch.Tensor:
    """The whole half on a contiguous, aligned ``x [B, H, W, C]``; ``out`` may be ``x``.

    ``vectors`` are ``pack_whole``'s, ``bias`` and ``head_scale`` packed; ``norm_first`` says where
    the norm is (V1), otherwise it stands behind proj (V2). ``config`` None takes the heuristic.
    """
    from fastswin._triton.pdl import pdl_options
    from fastswin.ops.attention_half.hopper_whole import _hopper_whole_kernel

    B, H, W, C = x.shape
    if out is None:
        out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    rows, cols = num_windows((H, W), window_size)
    windows = B * rows * cols
    if config is None:
        config = default_hopper_whole_config(C, windows, multiprocessor_count(x.device))
    programs = cdiv(windows, config.windows)
    check_grid(programs)
    width = HOPPER_WHOLE_WIDTH[C]
    launch(
        _hopper_whole_kernel, programs, x, describe(qkv_weight, 128, width),
        describe(proj_weight, 128, 32), describe(bias.view(-1, 64), 64, 64), vectors,
        vectors if head_scale is None else head_scale, out, scale * LOG2_E, eps, H, W, rows, cols,
        windows, config.windows,
        **_geometry(C, num_heads, window_size, shift_size, head_scale), WIDTH=width,
        NORM_FIRST=norm_first, VALUES=next_power_of_2(6 * C), GROUPS=config.groups,
        LOOP=config.windows > config.groups, REGISTERS=WINDOWS_REGISTERS[config.groups],
        num_warps=4, **pdl_options(pdl, HOPPER),
    )  # fmt: skip
    return out


def _geometry(
    C: int, num_heads: int, window_size: Pair, shift_size: Pair, head_scale: torch.Tensor | None
) -> dict[str, int | bool]:
    """Constants of all three kernels."""
    return {
        "C": C, "NH": num_heads, "N": window_size[0] * window_size[1], "WH": window_size[0],
        "WW": window_size[1], "SH": shift_size[0], "SW": shift_size[1],
        "COSINE": head_scale is not None,
    }  # fmt: skip
