"""Tiles of queries walk over the keys: dq, delta and V2's temperature gradient (backward_tiles.py).

delta = rowsum(dO * O)   [windows, nH, N] fp32, which the other two kernels read
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.launch import launch
from fastswin.ops.window_attention.backward_config import TileConfig
from fastswin.ops.window_attention.backward_problem import BackwardProblem, flatten_strides
from fastswin.ops.window_attention.launch import check_grid, output_strides
from fastswin.ops.window_attention.score_gradient import score_gradient
from fastswin.ops.window_attention.tile import (
    LN_2,
    inverse_norm,
    load_live_rows,
    load_row_stats,
    load_rows,
    locate_window,
    normalize_gradient,
    store_rows,
    token_rows,
)


@triton.jit
def _dq_tile(
    dq, q, q_norm, do, row_max, row_scale, delta, query, start, scale, seed, window, head,
    window_row, window_col, H, W, k_ptr, v_ptr, pad_ptr, k_stride_row, v_stride_row,
    bias_ptr, mask_ptr, drop_threshold, keep_factor, BLOCK: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr, HAS_PAD: tl.constexpr, COSINE: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``dq`` plus what keys ``start .. start + BLOCK`` give."""
    key = start + tl.arange(0, BLOCK)
    row = token_rows(window_row, window_col, key, H, W, WH, WW, SH, SW, PARTITIONED, HAS_PAD, WIDE)
    pad_k = pad_ptr + (NH + head) * D
    pad_v = pad_ptr + (2 * NH + head) * D
    k = load_rows(k_ptr, pad_k, row, key, k_stride_row, N, D, BLOCK_D, HAS_PAD)
    v = load_rows(v_ptr, pad_v, row, key, v_stride_row, N, D, BLOCK_D, HAS_PAD)
    k_norm = inverse_norm(k) if COSINE else 1.0
    ds = score_gradient(
        q, q_norm, k, k_norm, v, do, row_max, row_scale, delta, scale, seed, window, head,
        query, key, bias_ptr, mask_ptr, drop_threshold, keep_factor, NP, COSINE, HAS_MASK,
        DROPOUT, PRECISION,
    )  # fmt: skip
    unit = k
    if COSINE:
        unit = (k.to(tl.float32) * k_norm[:, None]).to(k.dtype)
    return tl.dot(ds.to(k.dtype), unit, dq, input_precision=PRECISION)


@triton.jit
def _window_attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, out_ptr, stats_ptr, delta_ptr, dq_ptr, dscale_ptr,
    bias_ptr, mask_ptr, head_scale_ptr, pad_ptr, seed_ptr,
    scale, grad_scale, drop_threshold, keep_factor,
    H, W, windows_per_col, windows_per_row, num_masks,
    q_stride_image, q_stride_row, q_stride_head,
    k_stride_image, k_stride_row, k_stride_head,
    v_stride_image, v_stride_row, v_stride_head,
    grad_stride_image, grad_stride_row, grad_stride_head,
    d_stride_image, d_stride_row, d_stride_head,
    out_stride_image, out_stride_row, out_stride_head,
    N: tl.constexpr, NP: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr, HAS_PAD: tl.constexpr, COSINE: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    NEEDS_Q: tl.constexpr, NEEDS_SCALE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TAIL: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (window, head, query tile)."""
    pid = tl.program_id(0)
    query_tiles: tl.constexpr = (N + BLOCK_Q - 1) // BLOCK_Q
    query = pid % query_tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    head = pid // query_tiles % NH
    window = pid // (query_tiles * NH)
    image, window_row, window_col, kind = locate_window(
        window, windows_per_col, windows_per_row, SH + SW > 0, PARTITIONED
    )
    row = token_rows(
        window_row, window_col, query, H, W, WH, WW, SH, SW, PARTITIONED, HAS_PAD, WIDE
    )
    real = query < N
    if HAS_PAD:
        real = real & (row >= 0)
    do = load_live_rows(
        grad_ptr + image * grad_stride_image + head * grad_stride_head, row, real,
        grad_stride_row, D, BLOCK_D,
    )  # fmt: skip
    o = load_live_rows(
        out_ptr + image * out_stride_image + head * out_stride_head, row, real,
        out_stride_row, D, BLOCK_D,
    )  # fmt: skip
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    statistics = (window.to(tl.int64) * NH + head) * N
    tl.store(delta_ptr + statistics + query, delta, mask=query < N)
    if NEEDS_Q or NEEDS_SCALE:
        row_max, row_scale = load_row_stats(stats_ptr + 2 * statistics, query, query < N)
        q = load_rows(
            q_ptr + image * q_stride_image + head * q_stride_head, pad_ptr + head * D, row, query,
            q_stride_row, N, D, BLOCK_D, HAS_PAD,
        )  # fmt: skip
        q_norm = inverse_norm(q) if COSINE else 1.0
        k_ptr += image * k_stride_image + head * k_stride_head
        v_ptr += image * v_stride_image + head * v_stride_head
        bias_ptr += (kind * NH + head) * (NP * NP)
        if HAS_MASK:
            mask_ptr += (window % num_masks).to(tl.int64) * (NP * NP)
        if COSINE:
            scale = tl.load(head_scale_ptr + head)
            grad_scale = scale * LN_2
        seed = 0
        if DROPOUT:
            seed = tl.load(seed_ptr)
        dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        for start in tl.range(0, N - TAIL, BLOCK_K, num_stages=NUM_STAGES):
            dq = _dq_tile(
                dq, q, q_norm, do, row_max, row_scale, delta, query, start, scale, seed, window,
                head, window_row, window_col, H, W, k_ptr, v_ptr, pad_ptr, k_stride_row,
                v_stride_row, bias_ptr, mask_ptr, drop_threshold, keep_factor, BLOCK_K,
                N, NP, NH, D, BLOCK_D, WH, WW, SH, SW, PARTITIONED, HAS_PAD, COSINE, HAS_MASK,
                DROPOUT, PRECISION, WIDE,
            )  # fmt: skip
        if TAIL > 0:
            dq = _dq_tile(
                dq, q, q_norm, do, row_max, row_scale, delta, query, N // BLOCK_K * BLOCK_K, scale,
                seed, window, head, window_row, window_col, H, W, k_ptr, v_ptr, pad_ptr,
                k_stride_row, v_stride_row, bias_ptr, mask_ptr, drop_threshold, keep_factor, TAIL,
                N, NP, NH, D, BLOCK_D, WH, WW, SH, SW, PARTITIONED, HAS_PAD, COSINE, HAS_MASK,
                DROPOUT, PRECISION, WIDE,
            )  # fmt: skip
        dq = dq * grad_scale
        if COSINE:
            dq, along = normalize_gradient(q, q_norm, dq)
            if NEEDS_SCALE:
                tl.store(dscale_ptr + pid, tl.sum(along, 0))
        if NEEDS_Q:
            dq_ptr += image * d_stride_image + head * d_stride_head
            store_rows(dq_ptr, dq, row, real, d_stride_row, D, BLOCK_D)


def launch_dq(
    problem: BackwardProblem, tiles: TileConfig
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch; delta ``[windows, nH, N]`` and, where needed, dlogit_scale per query tile."""
    shape, needs, grad = problem.shape, problem.needs, problem.grad
    windows, heads = shape.windows, shape.heads
    assert problem.row_stats is not None
    assert problem.out is not None
    delta = problem.row_stats.new_empty(problem.row_stats.shape[:-1])
    query_tiles = -(-shape.tokens // tiles.resident)
    dscale = None
    if needs.logit_scale:
        dscale = torch.empty(windows, heads, query_tiles, dtype=torch.float32, device=grad.device)
    programs = windows * heads * query_tiles
    check_grid(programs)
    launch(
        _window_attention_bwd_dq_kernel, programs,
        problem.q, problem.k, problem.v, grad, problem.out, problem.row_stats, delta, problem.dq,
        grad if dscale is None else dscale, *problem.tables, *problem.extents,
        *flatten_strides(problem.strides), *output_strides(shape), **problem.constants,
        NEEDS_Q=needs.q, NEEDS_SCALE=needs.logit_scale, BLOCK_Q=tiles.resident,
        BLOCK_K=tiles.walked, TAIL=tiles.tail, NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )  # fmt: skip
    return delta, dscale
