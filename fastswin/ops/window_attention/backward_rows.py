"""Window attention backward for windows above 64 tokens in runs of one kind, dbias in registers.

    P = exp2(S - max) / sum     delta = rowsum(dO * O)     dS = P * (dO V^T - delta)
    dq = scale * dS k           dbias = sum of dS over windows
    dV = P^T dO                 dk = scale * dS^T q

A program has one head and a run of windows of one kind (runs.py), as in backward_runs.py, and reads
the forward's output and row statistics, as in backward_tiles.py. Two ways to cut the queries:

    whole   a program has all of them: one pass, five products, nothing is computed twice. dbias
            takes 81 registers a thread at 144 tokens and 8 warps.
    split   a program has one tile of them: dq, delta and dbias; dk and dv come from tiles of keys
            (backward_dkv.py): seven products instead of nine.

Tiles are exact: ``BLOCK_Q`` queries at a time, then ``TAIL_Q`` (144 = 64 + 64 + 16), keys likewise.
The bias is read from L2 by every window. How many runs there are depends on the shape alone, and
each partial sum is written once: every card gives the same bits.
"""

# ruff: noqa: RUF005 - Triton has no starred tuples

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.launch import launch
from fastswin.ops.window_attention.backward_config import RowsBackwardConfig
from fastswin.ops.window_attention.backward_dkv import launch_dkv
from fastswin.ops.window_attention.backward_problem import (
    BackwardProblem,
    Partials,
    flatten_strides,
)
from fastswin.ops.window_attention.launch import output_strides
from fastswin.ops.window_attention.runs import (
    RUN_ARGUMENTS,
    first_row,
    locate_run,
    next_window,
    plan_runs,
    relative_rows,
    window_in_map,
)
from fastswin.ops.window_attention.tile import (
    LN_2,
    inverse_norm,
    load_live_rows,
    load_row_stats,
    normalize_gradient,
    power_of_2,
    scaled_products,
    store_rows,
)


@triton.jit
def _rows_tile(
    dq, dk, dv, q, q_norm, do, row_max, row_scale, delta, k, k_norm, v, scale, bias_ptr, offset,
    in_table, COSINE: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """``dq``, and where WHOLE ``dk`` and ``dv``, plus what one tile gives, and dS of the tile."""
    exact: tl.constexpr = q.dtype == tl.float32 and PRECISION == "ieee"
    # dS over a small norm, which fp16 cannot hold, takes fewer instructions than unit vectors
    wide: tl.constexpr = q.dtype != tl.float16
    bias = tl.load(bias_ptr + offset, mask=in_table, other=-float("inf")).to(tl.float32)
    s = scaled_products(q, q_norm, k, k_norm, scale, COSINE, PRECISION) + bias
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    p = power_of_2(s - row_max[:, None], exact) * row_scale[:, None]
    ds = p * (dp - delta[:, None])
    ds_half = ds.to(q.dtype)
    ds_k, unit_k = ds_half, k
    if COSINE and wide:
        ds_k = (ds * k_norm[None, :]).to(q.dtype)
    elif COSINE:
        unit_k = (k.to(tl.float32) * k_norm[:, None]).to(k.dtype)
    dq = tl.dot(ds_k, unit_k, dq, input_precision=PRECISION)
    if WHOLE:
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        ds_q, unit_q = ds_half, q
        if COSINE and wide:
            ds_q = (ds * q_norm[:, None]).to(q.dtype)
        elif COSINE:
            unit_q = (q.to(tl.float32) * q_norm[:, None]).to(q.dtype)
        dk = tl.dot(tl.trans(ds_q), unit_q, dk, input_precision=PRECISION)
    return dq, dk, dv, ds


@triton.jit(do_not_specialize=RUN_ARGUMENTS)
def _window_attention_bwd_rows_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, out_ptr, stats_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    dbias_ptr, dscale_ptr, bias_ptr, head_scale_ptr, scale, grad_scale,
    H, W, windows_per_col, windows_per_row, images, steps, interleaved,
    first_1, first_2, first_3, runs,
    q_stride_image, q_stride_row, q_stride_head,
    k_stride_image, k_stride_row, k_stride_head,
    v_stride_image, v_stride_row, v_stride_head,
    grad_stride_image, grad_stride_row, grad_stride_head,
    d_stride_image, d_stride_row, d_stride_head,
    out_stride_image, out_stride_row, out_stride_head,
    N: tl.constexpr, NP: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr, COSINE: tl.constexpr, PRECISION: tl.constexpr,
    NEEDS_Q: tl.constexpr, NEEDS_K: tl.constexpr, NEEDS_V: tl.constexpr,
    NEEDS_BIAS: tl.constexpr, NEEDS_SCALE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_Q: tl.constexpr, TAIL_Q: tl.constexpr, BLOCK_K: tl.constexpr, TAIL_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (run, head), or per (run, head, query tile) unless WHOLE."""
    SHIFTED: tl.constexpr = SH + SW > 0
    FULL_Q: tl.constexpr = (N - TAIL_Q + BLOCK_Q - 1) // BLOCK_Q
    FULL_K: tl.constexpr = (N - TAIL_K + BLOCK_K - 1) // BLOCK_K
    KEY_TILES: tl.constexpr = FULL_K + (TAIL_K > 0)
    QUERY_TILES: tl.constexpr = FULL_Q + (TAIL_Q > 0) if WHOLE else 1
    SPLITS: tl.constexpr = 1 if WHOLE else FULL_Q
    split = tl.program_id(0) % SPLITS
    head = tl.program_id(0) // SPLITS % NH
    run = tl.program_id(0) // (SPLITS * NH)
    kind, image, row, col, rows, cols, count, step_image, step_row, step_col = locate_run(
        run, images, steps, interleaved, first_1, first_2, first_3, runs,
        windows_per_col, windows_per_row, SHIFTED,
    )  # fmt: skip
    q_ptr += head * q_stride_head
    k_ptr += head * k_stride_head
    v_ptr += head * v_stride_head
    grad_ptr += head * grad_stride_head
    out_ptr += head * out_stride_head
    dq_ptr += head * d_stride_head
    dk_ptr += head * d_stride_head
    dv_ptr += head * d_stride_head
    bias_ptr += (kind * NH + head) * (NP * NP)
    if COSINE:
        scale = tl.load(head_scale_ptr + head)
        grad_scale = scale * LN_2
    window_row, window_col = window_in_map(
        row, col, kind, windows_per_col, windows_per_row, SHIFTED
    )
    query_places, key_places, sums, dscales = (), (), (), ()
    for i in tl.static_range(QUERY_TILES):
        query = split * BLOCK_Q + i * BLOCK_Q + tl.arange(0, BLOCK_Q if i < FULL_Q else TAIL_Q)
        place = relative_rows(window_row, window_col, query, H, W, WH, WW, SH, SW, PARTITIONED)
        query_places = query_places + (place,)
        dscales = dscales + (tl.zeros([BLOCK_Q if i < FULL_Q else TAIL_Q], tl.float32),)
        for j in tl.static_range(KEY_TILES):
            zeros = tl.zeros(
                [BLOCK_Q if i < FULL_Q else TAIL_Q, BLOCK_K if j < FULL_K else TAIL_K], tl.float32
            )
            sums = sums + (zeros,)
    for j in tl.static_range(KEY_TILES):
        key = j * BLOCK_K + tl.arange(0, BLOCK_K if j < FULL_K else TAIL_K)
        place = relative_rows(window_row, window_col, key, H, W, WH, WW, SH, SW, PARTITIONED)
        key_places = key_places + (place,)

    for _ in tl.range(0, count, num_stages=NUM_STAGES):
        map_row, map_col = window_in_map(row, col, kind, windows_per_col, windows_per_row, SHIFTED)
        window = (image * windows_per_col + map_row) * windows_per_row + map_col
        start = first_row(map_row, map_col, W, WH, WW, PARTITIONED).to(tl.int64)
        at_q = image * q_stride_image + start * q_stride_row
        at_k = image * k_stride_image + start * k_stride_row
        at_v = image * v_stride_image + start * v_stride_row
        at_grad = image * grad_stride_image + start * grad_stride_row
        at_out = image * out_stride_image + start * out_stride_row
        at_d = image * d_stride_image + start * d_stride_row
        statistics = (window * NH + head) * N
        ks, vs, k_norms, dks, dvs = (), (), (), (), ()
        for j in tl.static_range(KEY_TILES):
            keys = j * BLOCK_K + tl.arange(0, BLOCK_K if j < FULL_K else TAIL_K)
            k = load_live_rows(k_ptr + at_k, key_places[j], keys < N, k_stride_row, D, BLOCK_D)
            v = load_live_rows(v_ptr + at_v, key_places[j], keys < N, v_stride_row, D, BLOCK_D)
            ks, vs = ks + (k,), vs + (v,)
            k_norms = k_norms + (inverse_norm(k) if COSINE else 1.0,)
            zeros_k = tl.zeros([BLOCK_K if j < FULL_K else TAIL_K, BLOCK_D], tl.float32)
            dks, dvs = dks + (zeros_k,), dvs + (zeros_k,)
        new_sums, new_dscales = (), ()
        for i in tl.static_range(QUERY_TILES):
            asked = split * BLOCK_Q + i * BLOCK_Q + tl.arange(0, BLOCK_Q if i < FULL_Q else TAIL_Q)
            known = asked < N
            q = load_live_rows(q_ptr + at_q, query_places[i], known, q_stride_row, D, BLOCK_D)
            do = load_live_rows(
                grad_ptr + at_grad, query_places[i], known, grad_stride_row, D, BLOCK_D
            )
            o = load_live_rows(
                out_ptr + at_out, query_places[i], known, out_stride_row, D, BLOCK_D
            )  # fmt: skip
            row_max, row_scale = load_row_stats(stats_ptr + 2 * statistics, asked, known)
            delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
            if not WHOLE:
                tl.store(delta_ptr + statistics + asked, delta, mask=known)
            q_norm = inverse_norm(q) if COSINE else 1.0
            dq = tl.zeros([BLOCK_Q if i < FULL_Q else TAIL_Q, BLOCK_D], tl.float32)
            new_dks, new_dvs = (), ()
            for j in tl.static_range(KEY_TILES):
                other = j * BLOCK_K + tl.arange(0, BLOCK_K if j < FULL_K else TAIL_K)
                dq, dk, dv, ds = _rows_tile(
                    dq, dks[j], dvs[j], q, q_norm, do, row_max, row_scale, delta, ks[j],
                    k_norms[j], vs[j], scale, bias_ptr, asked[:, None] * NP + other[None, :],
                    (asked < NP)[:, None] & (other < NP)[None, :], COSINE, PRECISION, WHOLE,
                )  # fmt: skip
                new_dks, new_dvs = new_dks + (dk,), new_dvs + (dv,)
                if NEEDS_BIAS:
                    ds = sums[i * KEY_TILES + j] + ds
                else:
                    ds = sums[i * KEY_TILES + j]
                new_sums = new_sums + (ds,)
            dks, dvs = new_dks, new_dvs
            dq = dq * grad_scale
            if COSINE:
                dq, along = normalize_gradient(q, q_norm, dq)
                new_dscales = new_dscales + (dscales[i] + along,)
            else:
                new_dscales = new_dscales + (dscales[i],)
            if NEEDS_Q:
                store_rows(dq_ptr + at_d, dq, query_places[i], known, d_stride_row, D, BLOCK_D)
        sums, dscales = new_sums, new_dscales
        if WHOLE:
            for j in tl.static_range(KEY_TILES):
                stored = j * BLOCK_K + tl.arange(0, BLOCK_K if j < FULL_K else TAIL_K) < N
                dk_total = dks[j] * grad_scale
                if COSINE:
                    dk_total, _along = normalize_gradient(ks[j], k_norms[j], dk_total)
                if NEEDS_K:
                    store_rows(
                        dk_ptr + at_d, dk_total, key_places[j], stored, d_stride_row, D, BLOCK_D
                    )
                if NEEDS_V:
                    store_rows(
                        dv_ptr + at_d, dvs[j], key_places[j], stored, d_stride_row, D, BLOCK_D
                    )
        image, row, col = next_window(image, row, col, rows, cols, step_image, step_row, step_col)

    dbias_ptr += (run * NH + head).to(tl.int64) * (N * N)
    total = 0.0
    for i in tl.static_range(QUERY_TILES):
        total += tl.sum(dscales[i], 0)
        query = split * BLOCK_Q + i * BLOCK_Q + tl.arange(0, BLOCK_Q if i < FULL_Q else TAIL_Q)
        for j in tl.static_range(KEY_TILES):
            key = j * BLOCK_K + tl.arange(0, BLOCK_K if j < FULL_K else TAIL_K)
            inside = (query < N)[:, None] & (key < N)[None, :]
            if NEEDS_BIAS:
                tl.store(
                    dbias_ptr + query[:, None] * N + key[None, :], sums[i * KEY_TILES + j],
                    mask=inside,
                )  # fmt: skip
    if NEEDS_SCALE:
        tl.store(dscale_ptr + (run * NH + head) * SPLITS + split, total)


def launch_rows(problem: BackwardProblem, config: RowsBackwardConfig) -> Partials:
    """Launch; gradients of q, k, v are in the problem's tensors afterwards."""
    shape, needs, grad = problem.shape, problem.needs, problem.grad
    assert problem.row_stats is not None
    assert problem.out is not None
    heads, N = shape.heads, shape.tokens
    splits = 1 if config.dkv is None else -(-N // config.block_q)
    runs = plan_runs(shape, config.programs // splits)
    delta = grad
    if config.dkv is not None:
        delta = problem.row_stats.new_empty(problem.row_stats.shape[:-1])

    def sums(*sizes: int) -> torch.Tensor:
        return torch.empty(runs.total, *sizes, dtype=torch.float32, device=grad.device)

    dbias = sums(heads, N, N) if needs.bias else None
    dscale = sums(heads, splits) if needs.logit_scale else None
    bias, _, head_scale, _, _, scale, grad_scale, _, _ = problem.tables
    constants = problem.constants
    for unused in ("HAS_PAD", "HAS_MASK", "DROPOUT", "WIDE"):
        del constants[unused]
    launch(
        _window_attention_bwd_rows_kernel, runs.total * heads * splits,
        problem.q, problem.k, problem.v, grad, problem.out, problem.row_stats, delta,
        problem.dq, problem.dk, problem.dv, grad if dbias is None else dbias,
        grad if dscale is None else dscale, bias, head_scale, scale, grad_scale,
        *problem.extents[:4], *runs.arguments, *flatten_strides(problem.strides),
        *output_strides(shape), **constants, NEEDS_Q=needs.q, NEEDS_K=needs.k,
        NEEDS_V=needs.v, NEEDS_BIAS=needs.bias, NEEDS_SCALE=needs.logit_scale,
        WHOLE=config.dkv is None, BLOCK_Q=config.block_q, TAIL_Q=config.tail_q,
        BLOCK_K=config.block_k, TAIL_K=config.tail_k, NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    if config.dkv is not None:
        launch_dkv(problem, config.dkv, config.programs, delta, grad, fused=False)
    return Partials(dbias, dscale, None)
