"""Tiles of keys walk over the queries: dk, dv, the padding's gradient (backward_tiles.py).

Scores are transposed, so that P^T and dS^T are left operands without a transposition. With
NEEDS_BIAS a program walks over a run of windows and adds dS of its keys for all queries.
"""

# ruff: noqa: RUF005 - Triton has no starred tuples

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.launch import launch
from fastswin.ops.window_attention.backward_config import TiledBackwardConfig, number_of_runs
from fastswin.ops.window_attention.backward_problem import BackwardProblem, flatten_strides
from fastswin.ops.window_attention.launch import check_grid
from fastswin.ops.window_attention.tile import (
    LN_2,
    dropout_weights,
    inverse_norm,
    load_live_rows,
    load_row_stats,
    load_rows,
    normalize_gradient,
    power_of_2,
    scores,
    store_rows,
    token_rows,
    walk_to,
)


@triton.jit
def _dkv_tile(
    dk, dv, k, k_norm, v, key, start, live, scale, seed, window, head,
    window_row, window_col, H, W, q_ptr, grad_ptr, stats_ptr, delta_ptr, pad_ptr,
    q_stride_row, grad_stride_row, bias_ptr, mask_ptr, drop_threshold, keep_factor,
    BLOCK: tl.constexpr, KEY_STEP: tl.constexpr, QUERY_STEP: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr, HAS_PAD: tl.constexpr, COSINE: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    NEEDS_K: tl.constexpr, NEEDS_V: tl.constexpr,
):  # fmt: skip
    """``dk``, ``dv`` plus what queries ``start .. start + BLOCK`` give, and dS^T of the tile."""
    query = start + tl.arange(0, BLOCK)
    row = token_rows(
        window_row, window_col, query, H, W, WH, WW, SH, SW, PARTITIONED, HAS_PAD, WIDE
    )
    real = query < N
    if HAS_PAD:
        real = real & (row >= 0)
    q = load_rows(q_ptr, pad_ptr + head * D, row, query, q_stride_row, N, D, BLOCK_D, HAS_PAD)
    do = load_live_rows(grad_ptr, row, real, grad_stride_row, D, BLOCK_D)
    # a query that does not exist, or a window past the last, has weights of 0
    row_max, row_scale = load_row_stats(stats_ptr, query, (query < N) & live)
    delta = tl.load(delta_ptr + query, mask=(query < N) & live, other=0.0)
    q_norm = inverse_norm(q) if COSINE else 1.0
    in_table = (key < NP)[:, None] & (query < NP)[None, :]
    s = scores(
        k, k_norm, q, q_norm, scale, bias_ptr, mask_ptr,
        key[:, None] * KEY_STEP + query[None, :] * QUERY_STEP, in_table,
        COSINE, HAS_MASK, PRECISION,
    )  # fmt: skip
    exact: tl.constexpr = q.dtype == tl.float32 and PRECISION == "ieee"
    p = power_of_2(s - row_max[None, :], exact) * row_scale[None, :]
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    kept = p
    if DROPOUT:
        weights = dropout_weights(
            seed, window, head, query[None, :], key[:, None], drop_threshold, keep_factor
        )
        kept = p * weights
        dp = dp * weights
    if NEEDS_V:
        dv = tl.dot(kept.to(do.dtype), do, dv, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    if NEEDS_K:
        unit = q
        if COSINE:
            unit = (q.to(tl.float32) * q_norm[:, None]).to(q.dtype)
        dk = tl.dot(ds.to(q.dtype), unit, dk, input_precision=PRECISION)
    return dk, dv, ds


@triton.jit
def _window_attention_bwd_dkv_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, stats_ptr, delta_ptr, dk_ptr, dv_ptr, dbias_ptr, dpad_ptr,
    bias_ptr, mask_ptr, head_scale_ptr, pad_ptr, seed_ptr,
    scale, grad_scale, drop_threshold, keep_factor,
    H, W, windows_per_col, windows_per_row, num_masks, windows, runs, steps, slots,
    q_stride_image, q_stride_row, q_stride_head,
    k_stride_image, k_stride_row, k_stride_head,
    v_stride_image, v_stride_row, v_stride_head,
    grad_stride_image, grad_stride_row, grad_stride_head,
    d_stride_image, d_stride_row, d_stride_head,
    N: tl.constexpr, NP: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr, HAS_PAD: tl.constexpr, COSINE: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    NEEDS_K: tl.constexpr, NEEDS_V: tl.constexpr, NEEDS_BIAS: tl.constexpr,
    NEEDS_PAD: tl.constexpr, KEY_STEP: tl.constexpr, QUERY_STEP: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_Q: tl.constexpr, TAIL: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (run of windows, head, key tile); a run is one window unless NEEDS_BIAS."""
    pid = tl.program_id(0)
    key_tiles: tl.constexpr = (N + BLOCK_K - 1) // BLOCK_K
    WALKED: tl.constexpr = (N - TAIL + BLOCK_Q - 1) // BLOCK_Q
    C: tl.constexpr = NH * D
    key = pid % key_tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    head = pid // key_tiles % NH
    run = pid // (key_tiles * NH)
    if COSINE:
        scale = tl.load(head_scale_ptr + head)
        grad_scale = scale * LN_2
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    sums = ()
    if NEEDS_BIAS:
        for _ in tl.static_range(WALKED):
            sums = sums + (tl.zeros([BLOCK_K, BLOCK_Q], tl.float32),)
        if TAIL > 0:
            sums = sums + (tl.zeros([BLOCK_K, TAIL], tl.float32),)

    for i in tl.range(0, steps, num_stages=NUM_STAGES if NEEDS_BIAS else 1):
        window, image, window_row, window_col, kind, row, known, real = walk_to(
            run + i * runs, windows, key, H, W, windows_per_col, windows_per_row,
            N, WH, WW, SH, SW, PARTITIONED, HAS_PAD, WIDE,
        )  # fmt: skip
        live = run + i * runs < windows
        k = load_rows(
            k_ptr + image * k_stride_image + head * k_stride_head, pad_ptr + C + head * D, row,
            key, k_stride_row, N, D, BLOCK_D, HAS_PAD,
        )  # fmt: skip
        v = load_rows(
            v_ptr + image * v_stride_image + head * v_stride_head, pad_ptr + 2 * C + head * D, row,
            key, v_stride_row, N, D, BLOCK_D, HAS_PAD,
        )  # fmt: skip
        k_norm = inverse_norm(k) if COSINE else 1.0
        q_window = q_ptr + image * q_stride_image + head * q_stride_head
        grad_window = grad_ptr + image * grad_stride_image + head * grad_stride_head
        statistics = (window.to(tl.int64) * NH + head) * N
        stats_window = stats_ptr + 2 * statistics
        delta_window = delta_ptr + statistics
        bias_window = bias_ptr + (kind * NH + head) * (NP * NP)
        mask_window = mask_ptr
        if HAS_MASK:
            mask_window = mask_ptr + (window % num_masks).to(tl.int64) * (NP * NP)
        dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
        new_sums = ()
        if NEEDS_BIAS:
            for t in tl.static_range(WALKED):
                dk, dv, ds = _dkv_tile(
                    dk, dv, k, k_norm, v, key, t * BLOCK_Q, live, scale, seed, window, head,
                    window_row, window_col, H, W, q_window, grad_window, stats_window, delta_window,
                    pad_ptr, q_stride_row, grad_stride_row, bias_window, mask_window,
                    drop_threshold, keep_factor, BLOCK_Q, KEY_STEP, QUERY_STEP,
                    N, NP, D, BLOCK_D, WH, WW, SH, SW, PARTITIONED, HAS_PAD, COSINE, HAS_MASK,
                    DROPOUT, PRECISION, WIDE, NEEDS_K or NEEDS_PAD, NEEDS_V or NEEDS_PAD,
                )  # fmt: skip
                new_sums = new_sums + (sums[t] + ds,)
        else:
            for start in tl.range(0, N - TAIL, BLOCK_Q, num_stages=NUM_STAGES):
                dk, dv, _unused = _dkv_tile(
                    dk, dv, k, k_norm, v, key, start, live, scale, seed, window, head,
                    window_row, window_col, H, W, q_window, grad_window, stats_window, delta_window,
                    pad_ptr, q_stride_row, grad_stride_row, bias_window, mask_window,
                    drop_threshold, keep_factor, BLOCK_Q, KEY_STEP, QUERY_STEP,
                    N, NP, D, BLOCK_D, WH, WW, SH, SW, PARTITIONED, HAS_PAD, COSINE, HAS_MASK,
                    DROPOUT, PRECISION, WIDE, NEEDS_K or NEEDS_PAD, NEEDS_V or NEEDS_PAD,
                )  # fmt: skip
        if TAIL > 0:
            dk, dv, ds_tail = _dkv_tile(
                dk, dv, k, k_norm, v, key, WALKED * BLOCK_Q, live, scale, seed, window, head,
                window_row, window_col, H, W, q_window, grad_window, stats_window, delta_window,
                pad_ptr, q_stride_row, grad_stride_row, bias_window, mask_window, drop_threshold,
                keep_factor, TAIL, KEY_STEP, QUERY_STEP,
                N, NP, D, BLOCK_D, WH, WW, SH, SW, PARTITIONED, HAS_PAD, COSINE, HAS_MASK,
                DROPOUT, PRECISION, WIDE, NEEDS_K or NEEDS_PAD, NEEDS_V or NEEDS_PAD,
            )  # fmt: skip
            if NEEDS_BIAS:
                new_sums = new_sums + (sums[WALKED] + ds_tail,)
        if NEEDS_BIAS:
            sums = new_sums
        if NEEDS_K or NEEDS_PAD:
            dk = dk * grad_scale
            if COSINE:
                dk, _along = normalize_gradient(k, k_norm, dk)
        d_image = image * d_stride_image + head * d_stride_head
        if NEEDS_K:
            store_rows(dk_ptr + d_image, dk, row, real, d_stride_row, D, BLOCK_D)
        if NEEDS_V:
            store_rows(dv_ptr + d_image, dv, row, real, d_stride_row, D, BLOCK_D)
        if NEEDS_PAD:
            slot_ptr = dpad_ptr + image * slots * (2 * C) + head * D
            padded = known & (row < 0)
            store_rows(slot_ptr, dk, -1 - row, padded, 2 * C, D, BLOCK_D)
            store_rows(slot_ptr + C, dv, -1 - row, padded, 2 * C, D, BLOCK_D)
    if NEEDS_BIAS:
        dbias_ptr += (run * NH + head).to(tl.int64) * (N * N)
        for t in tl.static_range(WALKED):
            query = t * BLOCK_Q + tl.arange(0, BLOCK_Q)
            inside = (key < N)[:, None] & (query < N)[None, :]
            tl.store(dbias_ptr + query[None, :] * N + key[:, None], sums[t], mask=inside)
        if TAIL > 0:
            query_tail = WALKED * BLOCK_Q + tl.arange(0, TAIL)
            inside_tail = (key < N)[:, None] & (query_tail < N)[None, :]
            tl.store(
                dbias_ptr + query_tail[None, :] * N + key[:, None], sums[WALKED], mask=inside_tail
            )


def launch_dkv(
    problem: BackwardProblem,
    config: TiledBackwardConfig,
    delta: torch.Tensor,
    dpad: torch.Tensor,
    fused: bool,
) -> torch.Tensor | None:
    """dk, dv, the padding's gradient and, where fused, dbias per run ``[runs, nH, N, N]``."""
    shape, needs, tiles = problem.shape, problem.needs, config.dkv
    if not (needs.k or needs.v or needs.pad or fused):
        return None
    windows, heads, N = shape.windows, shape.heads, shape.tokens
    key_tiles = -(-N // tiles.resident)
    runs = windows
    dbias = None
    if fused:
        runs = number_of_runs(config.programs, heads * key_tiles, windows)
        dbias = torch.empty(
            runs, heads, N, N, dtype=torch.float32, device=delta.device
        )  # fmt: skip
    NP = problem.bias.shape[-1]
    bias, *tables = problem.tables
    key_step, query_step = 1, NP
    if problem.mask is None:  # a copy of the table, so that a row of the transposed tile is a row
        bias = bias.transpose(-1, -2).contiguous()
        key_step, query_step = NP, 1
    check_grid(runs * heads * key_tiles)
    assert problem.row_stats is not None
    launch(
        _window_attention_bwd_dkv_kernel, runs * heads * key_tiles,
        problem.q, problem.k, problem.v, problem.grad, problem.row_stats, delta, problem.dk,
        problem.dv, delta if dbias is None else dbias, dpad, bias, *tables, *problem.extents,
        windows, runs, -(-windows // runs), shape.padding_slots, *flatten_strides(problem.strides),
        **problem.constants, NEEDS_K=needs.k, NEEDS_V=needs.v,
        NEEDS_BIAS=fused, NEEDS_PAD=needs.pad, KEY_STEP=key_step, QUERY_STEP=query_step,
        BLOCK_K=tiles.resident, BLOCK_Q=tiles.walked, TAIL=tiles.tail,
        NUM_STAGES=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip
    return dbias
