"""Window attention backward for long windows, in tiles, from the saved statistics of each row.

    P = exp2(S - max) / sum     delta = rowsum(dO * O) = rowsum(P * dP)     dS = P * (dP - delta)

Three kernels, each of which holds one tile and walks over the others:

    dq      a tile of queries walks over the keys; also writes delta, and V2's temperature gradient
    dkv     a tile of keys walks over the queries, on transposed scores, so that P^T and dS^T are
            left operands without a transposition
    dbias   a tile of (queries, keys) walks over a run of windows and adds dS in registers

dkv can take dbias along (``fused``): its programs then walk over a run of windows and hold dS of
their keys for all queries; that fits up to about 144 tokens and saves two of nine products.
Tiles are exact: ``walked`` keys at a time, then a ``tail`` (144 = 128 + 16).
"""


# ruff: noqa: RUF005 - Triton has no starred tuples

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.launch import launch
from fastswin.ops.window_attention.backward_config import TiledBackwardConfig, number_of_runs
from fastswin.ops.window_attention.backward_problem import (
    BackwardProblem,
    Partials,
    flatten_strides,
)
from fastswin.ops.window_attention.launch import check_grid, output_strides
from fastswin.ops.window_attention.tile import (
    LN_2,
    dropout_weights,
    inverse_norm,
    load_live_rows,
    load_row_stats,
    load_rows,
    locate_window,
    normalize_gradient,
    power_of_2,
    scores,
    store_rows,
    token_rows,
)


@triton.jit
def _score_gradient(
    q, q_norm, k, k_norm, v, do, row_max, row_scale, delta, scale, seed, window, head,
    query, key, bias_ptr, mask_ptr, drop_threshold, keep_factor,
    NP: tl.constexpr, COSINE: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dS of one tile, queries x keys."""
    in_table = (query < NP)[:, None] & (key < NP)[None, :]
    s = scores(
        q, q_norm, k, k_norm, scale, bias_ptr, mask_ptr, query[:, None] * NP + key[None, :],
        in_table, COSINE, HAS_MASK, PRECISION,
    )  # fmt: skip
    exact: tl.constexpr = q.dtype == tl.float32 and PRECISION == "ieee"
    p = power_of_2(s - row_max[:, None], exact) * row_scale[:, None]
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    if DROPOUT:
        dp = dp * dropout_weights(
            seed, window, head, query[:, None], key[None, :], drop_threshold, keep_factor
        )
    return p * (dp - delta[:, None])


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
    ds = _score_gradient(
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
        wanted = run + i * runs
        live = wanted < windows
        window = tl.minimum(wanted, windows - 1)
        image, window_row, window_col, kind = locate_window(
            window, windows_per_col, windows_per_row, SH + SW > 0, PARTITIONED
        )
        row = token_rows(
            window_row, window_col, key, H, W, WH, WW, SH, SW, PARTITIONED, HAS_PAD, WIDE
        )
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
        known = (key < N) & live
        real = known
        if HAS_PAD:
            real = known & (row >= 0)
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
        wanted = run + i * runs
        window = tl.minimum(wanted, windows - 1)
        image, window_row, window_col, kind = locate_window(
            window, windows_per_col, windows_per_row, SH + SW > 0, PARTITIONED
        )
        row = token_rows(
            window_row, window_col, query, H, W, WH, WW, SH, SW, PARTITIONED, HAS_PAD, WIDE
        )
        key_row = token_rows(
            window_row, window_col, key, H, W, WH, WW, SH, SW, PARTITIONED, HAS_PAD, WIDE
        )
        known = (query < N) & (wanted < windows)
        real = known
        if HAS_PAD:
            real = known & (row >= 0)
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
        dbias += _score_gradient(
            q, q_norm, k, k_norm, v, do, row_max, row_scale, delta, scale, seed, window, head,
            query, key, bias_ptr + kind * (NH * NP * NP), mask_window, drop_threshold, keep_factor,
            NP, COSINE, HAS_MASK, DROPOUT, PRECISION,
        )  # fmt: skip
    dbias_ptr += (run * NH + head).to(tl.int64) * (N * N)
    inside = (query < N)[:, None] & (key < N)[None, :]
    tl.store(dbias_ptr + query[:, None] * N + key[None, :], dbias, mask=inside)


def launch_tiles(problem: BackwardProblem, config: TiledBackwardConfig) -> Partials:
    """Launch; gradients of q, k, v are in the problem's tensors afterwards."""
    shape, needs, grad = problem.shape, problem.needs, problem.grad
    windows, heads, N = shape.windows, shape.heads, shape.tokens
    assert problem.row_stats is not None
    assert problem.out is not None
    delta = problem.row_stats.new_empty(problem.row_stats.shape[:-1])
    dscale = grad
    query_tiles = -(-N // config.dq.resident)
    if needs.logit_scale:
        dscale = torch.empty(windows, heads, query_tiles, dtype=torch.float32, device=grad.device)
    constants, tables, extents = problem.constants, problem.tables, problem.extents
    strides = flatten_strides(problem.strides)
    programs = windows * heads * query_tiles
    check_grid(programs)
    launch(
        _window_attention_bwd_dq_kernel, programs,
        problem.q, problem.k, problem.v, grad, problem.out, problem.row_stats, delta, problem.dq,
        dscale, *tables, *extents, *strides, *output_strides(shape), **constants,
        NEEDS_Q=needs.q, NEEDS_SCALE=needs.logit_scale, BLOCK_Q=config.dq.resident,
        BLOCK_K=config.dq.walked, TAIL=config.dq.tail, NUM_STAGES=config.dq.num_stages,
        num_warps=config.dq.num_warps,
    )  # fmt: skip
    fused = needs.bias and config.dbias is None
    dpad = problem.new_padding_gradient()
    dbias = _launch_dkv(problem, config, delta, dpad, fused)
    if needs.bias and not fused:
        dbias = _launch_dbias(problem, config, delta)
    return Partials(
        dbias, dscale if needs.logit_scale else None, dpad if needs.pad else None
    )  # fmt: skip


def _launch_dkv(
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


def _launch_dbias(
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
