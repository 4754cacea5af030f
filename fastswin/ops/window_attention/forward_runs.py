"""Window attention forward in runs: one program per head and run of windows of one kind (runs.py).

    qkv    [B, H, W, 3, nH, D]   or q, k, v [B_, nH, N, D] when PARTITIONED
    bias   [kinds, nH, NP, NP]   (bias + shift mask) * log2(e), see packing.py
    out    [B, H, W, nH, D]      or [B_, nH, N, D]

The same arithmetic as forward.py for windows of up to 64 tokens. There every window and head reads
its 16 KB of fp32 bias from L2, more than the 9 KB of q, k and v at N = 49; at Swin-T's first stage,
batch 128, 402 of 710 MB. Here a program reads it once, into registers, and next windows' q, k, v
fill the load pipeline instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.launch import launch
from fastswin.ops.window_attention.config import WindowAttentionConfig
from fastswin.ops.window_attention.launch import (
    AttentionShape,
    Dropout,
    Strides,
    dropout_arguments,
)
from fastswin.ops.window_attention.packing import LOG2_E
from fastswin.ops.window_attention.runs import (
    RUN_ARGUMENTS,
    load_window,
    locate_run,
    locate_tokens,
    next_window,
    plan_runs,
    relative_rows,
    window_in_map,
)
from fastswin.ops.window_attention.tile import (
    dropout_weights,
    inverse_norm,
    inverse_sum,
    operand,
    power_of_2,
    scaled_products,
    store_row_stats,
    store_rows,
)


@triton.jit(do_not_specialize=RUN_ARGUMENTS)
def _window_attention_fwd_runs_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, stats_ptr, bias_ptr, head_scale_ptr, pad_ptr, seed_ptr,
    scale, drop_threshold, keep_factor,
    H, W, windows_per_col, windows_per_row, images, steps, interleaved,
    first_1, first_2, first_3, runs,
    q_stride_image, q_stride_row, q_stride_head,
    k_stride_image, k_stride_row, k_stride_head,
    v_stride_image, v_stride_row, v_stride_head,
    out_stride_image, out_stride_row, out_stride_head,
    N: tl.constexpr, NP: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr, HAS_PAD: tl.constexpr, COSINE: tl.constexpr,
    HAS_STATS: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (run, head)."""
    exact: tl.constexpr = q_ptr.dtype.element_ty == tl.float32 and PRECISION != "tf32"
    SHIFTED: tl.constexpr = SH + SW > 0
    head = tl.program_id(0) % NH
    kind, image, row, col, rows, cols, count, step_image, step_row, step_col = locate_run(
        tl.program_id(0) // NH, images, steps, interleaved, first_1, first_2, first_3, runs,
        windows_per_col, windows_per_row, SHIFTED,
    )  # fmt: skip
    token = tl.arange(0, NP)
    q_ptr += head * q_stride_head
    k_ptr += head * k_stride_head
    v_ptr += head * v_stride_head
    out_ptr += head * out_stride_head
    if COSINE:
        scale = tl.load(head_scale_ptr + head)
    if DROPOUT:
        seed = tl.load(seed_ptr)
    window_row, window_col = window_in_map(
        row, col, kind, windows_per_col, windows_per_row, SHIFTED
    )
    place = relative_rows(window_row, window_col, token, H, W, WH, WW, SH, SW, PARTITIONED)
    offset = token[:, None] * NP + token[None, :]
    bias = tl.load(bias_ptr + (kind * NH + head) * (NP * NP) + offset).to(tl.float32)
    for _ in tl.range(0, count, num_stages=NUM_STAGES):
        window, start, place, real = locate_tokens(
            image, row, col, kind, place, token, H, W, windows_per_col, windows_per_row,
            WH, WW, SH, SW, PARTITIONED, HAS_PAD, WIDE, N,
        )  # fmt: skip
        q, k, v = load_window(
            q_ptr, k_ptr, v_ptr, pad_ptr, image, start, place, token, head,
            q_stride_image, q_stride_row, k_stride_image, k_stride_row, v_stride_image,
            v_stride_row, N, NH, D, BLOCK_D, PARTITIONED, HAS_PAD,
        )  # fmt: skip
        q_norm = inverse_norm(q) if COSINE else 1.0
        k_norm = inverse_norm(k) if COSINE else 1.0
        s = scaled_products(q, q_norm, k, k_norm, scale, COSINE, PRECISION) + bias
        row_max = tl.max(s, 1)
        row_max = tl.where(row_max == -float("inf"), 0.0, row_max)
        p = power_of_2(s - row_max[:, None], exact)
        total = tl.sum(p, 1)
        if DROPOUT:
            p *= dropout_weights(
                seed, window.to(tl.int32), head, token[:, None], token[None, :], drop_threshold,
                keep_factor,
            )  # fmt: skip
        p = operand(p.to(v.dtype), PRECISION)
        o = tl.dot(p, operand(v, PRECISION), input_precision=PRECISION)
        if HAS_STATS:
            stats_window = stats_ptr + (window * NH + head) * (2 * N)
            store_row_stats(stats_window, row_max, total, token, N, exact)
        if exact:
            o = o / tl.where(total == 0.0, 1.0, total)[:, None]
        else:  # a division of each element takes three instructions more
            o = o * inverse_sum(total, exact)[:, None]
        store_rows(
            out_ptr + image * out_stride_image + start * out_stride_row, o, place, real,
            out_stride_row, D, BLOCK_D,
        )  # fmt: skip
        image, row, col = next_window(image, row, col, rows, cols, step_image, step_row, step_col)


def launch_forward_runs(
    shape: AttentionShape,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    pad: torch.Tensor | None,
    scale: float,
    strides: list[Strides],
    precision: str,
    config: WindowAttentionConfig,
    row_stats: torch.Tensor | None,
    dropout: Dropout | None,
) -> None:
    """Launch into ``out``; arguments are packed, as in forward.py."""
    runs = plan_runs(shape, config.programs)
    seed, threshold, factor = dropout_arguments(dropout, bias)
    launch(
        _window_attention_fwd_runs_kernel, runs.total * shape.heads, *qkv, out,
        bias if row_stats is None else row_stats, bias,
        bias if head_scale is None else head_scale, bias if pad is None else pad, seed,
        scale * LOG2_E, threshold, factor, *shape.map_size, *shape.grid_size, *runs.arguments,
        *(s for triple in strides for s in triple), **shape.constants(bias, precision, strides),
        COSINE=head_scale is not None, HAS_STATS=row_stats is not None,
        DROPOUT=dropout is not None, NUM_STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
