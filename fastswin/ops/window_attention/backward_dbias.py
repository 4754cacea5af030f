"""A tile of (queries, keys) walks over a run of windows and adds dS in registers: dbias per run.

dbias [runs, nH, N, N] fp32 (backward_tiles.py)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.launch import launch
from fastswin.ops.window_attention.backward_config import TiledBackwardConfig, number_of_runs
from fastswin.ops.window_attention.backward_problem import BackwardProblem, flatten_strides
from fastswin.ops.window_attention.score_gradient import score_gradient
from fastswin.ops.window_attention.tile import (
    inverse_norm,
    load_live_rows,
    load_row_stats,
    load_rows,
    token_rows,
    walk_to,
)


@triton.jit
def _window_attention_bwd_dbias_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, stats_ptr, delta_ptr, dbias_ptr,
    bias_ptr, mask_ptr, head_scale_ptr, pad_ptr, seed_ptr,
    scale, grad_scale, drop_threshold, keep_factor,
    H, W, windows_per_col, windows_per_row, num_masks, windows, runs, steps,
    q_stride_image, q_stride_row, q_stride_head,
    k_stride_image, k_stride_row, k_stride_head,
    v_stride_image, v_stride_row, v_stride_head,
    grad_stride_image, grad_stride_row, grad_stride_head,
    d_stride_image, d_stride_row, d_stride_head,
    N: tl.constexpr, NP: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr, HAS_PAD: tl.constexpr, COSINE: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (run of windows, head, query tile, key tile)."""
    pid = tl.program_id(0)
    query_tiles: tl.constexpr = (N + BLOCK_Q - 1) // BLOCK_Q
    key_tiles: tl.constexpr = (N + BLOCK_K - 1) // BLOCK_K
    key = pid % key_tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    query = pid // key_tiles % query_tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    head = pid // (key_tiles * query_tiles) % NH
    run = pid // (key_tiles * query_tiles * NH)
    q_ptr += head * q_stride_head
    k_ptr += head * k_stride_head
    v_ptr += head * v_stride_head
    grad_ptr += head * grad_stride_head
    bias_ptr += head * (NP * NP)
    if COSINE:
        scale = tl.load(head_scale_ptr + head)
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    dbias = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for i in tl.range(0, steps, num_stages=NUM_STAGES):
        window, image, window_row, window_col, kind, row, known, real = walk_to(
            run + i * runs, windows, query, H, W, windows_per_col, windows_per_row,
            N, WH, WW, SH, SW, PARTITIONED, HAS_PAD, WIDE,
        )  # fmt: skip
        key_row = token_rows(
            window_row, window_col, key, H, W, WH, WW, SH, SW, PARTITIONED, HAS_PAD, WIDE
        )
        q = load_rows(
            q_ptr + image * q_stride_image, pad_ptr + head * D, row, query, q_stride_row,
            N, D, BLOCK_D, HAS_PAD,
        )  # fmt: skip
        k = load_rows(
            k_ptr + image * k_stride_image, pad_ptr + (NH + head) * D, key_row, key, k_stride_row,
            N, D, BLOCK_D, HAS_PAD,
        )  # fmt: skip
        v = load_rows(
            v_ptr + image * v_stride_image, pad_ptr + (2 * NH + head) * D, key_row, key,
            v_stride_row, N, D, BLOCK_D, HAS_PAD,
        )  # fmt: skip
        do = load_live_rows(
            grad_ptr + image * grad_stride_image, row, real, grad_stride_row, D, BLOCK_D
        )
        statistics = (window.to(tl.int64) * NH + head) * N + query
        row_max, row_scale = load_row_stats(stats_ptr, statistics, known)
        delta = tl.load(delta_ptr + statistics, mask=known, other=0.0)
        q_norm = inverse_norm(q) if COSINE else 1.0
        k_norm = inverse_norm(k) if COSINE else 1.0
        mask_window = mask_ptr
        if HAS_MASK:
            mask_window = mask_ptr + (window % num_masks).to(tl.int64) * (NP * NP)
        dbias += score_gradient(
            q, q_norm, k, k_norm, v, do, row_max, row_scale, delta, scale, seed, window, head,
            query, key, bias_ptr + kind * (NH * NP * NP), mask_window, drop_threshold, keep_factor,
            NP, COSINE, HAS_MASK, DROPOUT, PRECISION,
        )  # fmt: skip
    dbias_ptr += (run * NH + head).to(tl.int64) * (N * N)
    inside = (query < N)[:, None] & (key < N)[None, :]
    tl.store(dbias_ptr + query[:, None] * N + key[None, :], dbias, mask=inside)


def launch_dbias(
    problem: BackwardProblem, config: TiledBackwardConfig, delta: torch.Tensor
) -> torch.Tensor:
    """dbias per run, ``[runs, nH, N, N]``."""
    shape, tiles = problem.shape, config.dbias
    assert tiles is not None
    assert problem.row_stats is not None
    windows, heads, N = shape.windows, shape.heads, shape.tokens
    per_run = heads * -(-N // tiles.resident) * -(-N // tiles.walked)
    runs = number_of_runs(config.programs, per_run, windows)
    dbias = torch.empty(runs, heads, N, N, dtype=torch.float32, device=delta.device)
    launch(
        _window_attention_bwd_dbias_kernel, runs * per_run,
        problem.q, problem.k, problem.v, problem.grad, problem.row_stats, delta, dbias,
        *problem.tables, *problem.extents, windows, runs, -(-windows // runs),
        *flatten_strides(problem.strides), **problem.constants, BLOCK_Q=tiles.resident,
        BLOCK_K=tiles.walked, NUM_STAGES=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip
    return dbias
