"""Window attention backward for windows of up to 64 tokens in runs of one kind: one kernel.

    P  = softmax(S),  S = scale * q k^T + bias + mask          recomputed, nothing was saved
    dV = P^T dO       dP = dO V^T      dS = P * (dP - rowsum(P * dP))
    dq = scale * dS k                  dk = scale * dS^T q      dbias = sum of dS over windows

The same arithmetic as backward_whole.py, whose windows are of all kinds: every window reads 16 KB
of bias from L2 beside 12 KB of q, k, v and dO at N = 49, and makes its addresses again. A run
(runs.py) has one kind and head, so both are made once. dS is added into a tile in registers and
written once per program; a second stage adds the tiles in a fixed order. How many runs there are
depends on the shape alone, so that every card gives the same bits.

Bytes: 7 * tokens * C * itemsize (qkv and dO read, dqkv written).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.launch import launch
from fastswin.ops.window_attention.backward_config import WholeBackwardConfig
from fastswin.ops.window_attention.backward_problem import (
    BackwardProblem,
    Partials,
    flatten_strides,
)
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
    LN_2,
    dropout_weights,
    inverse_norm,
    inverse_sum,
    load_live_rows,
    normalize_gradient,
    power_of_2,
    scaled_products,
    store_rows,
)


@triton.jit
def _pair_rows(x):
    """``[N, D]`` to ``[N / 16, 8, D]``: rows 8 apart added, which one thread holds (mma layout)."""
    x = tl.reshape(x, [x.shape[0] // 16, 2, 8, x.shape[1]])
    return tl.sum(x, 1)


@triton.jit(do_not_specialize=RUN_ARGUMENTS)
def _window_attention_bwd_runs_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dq_ptr, dk_ptr, dv_ptr, dbias_ptr, dscale_ptr, dpad_ptr,
    dsum_ptr, bias_ptr, mask_ptr, head_scale_ptr, pad_ptr, seed_ptr,
    scale, grad_scale, drop_threshold, keep_factor,
    H, W, windows_per_col, windows_per_row, num_masks, images, steps, interleaved,
    first_1, first_2, first_3, runs, slots,
    q_stride_image, q_stride_row, q_stride_head,
    k_stride_image, k_stride_row, k_stride_head,
    v_stride_image, v_stride_row, v_stride_head,
    grad_stride_image, grad_stride_row, grad_stride_head,
    d_stride_image, d_stride_row, d_stride_head,
    N: tl.constexpr, NP: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr, HAS_PAD: tl.constexpr, COSINE: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    NEEDS_Q: tl.constexpr, NEEDS_K: tl.constexpr, NEEDS_V: tl.constexpr,
    NEEDS_BIAS: tl.constexpr, NEEDS_SCALE: tl.constexpr, NEEDS_PAD: tl.constexpr,
    NEEDS_SUM: tl.constexpr, HOLDS_BIAS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (run, head)."""
    exact: tl.constexpr = q_ptr.dtype.element_ty == tl.float32 and PRECISION == "ieee"
    # dS over a small norm, which fp16 cannot hold, takes fewer instructions than unit vectors
    wide: tl.constexpr = q_ptr.dtype.element_ty != tl.float16
    SHIFTED: tl.constexpr = SH + SW > 0
    C: tl.constexpr = NH * D
    head = tl.program_id(0) % NH
    run = tl.program_id(0) // NH
    kind, image, row, col, rows, cols, count, step_image, step_row, step_col = locate_run(
        run, images, steps, interleaved, first_1, first_2, first_3, runs,
        windows_per_col, windows_per_row, SHIFTED,
    )  # fmt: skip
    token = tl.arange(0, NP)
    offset = token[:, None] * NP + token[None, :]
    q_ptr += head * q_stride_head
    k_ptr += head * k_stride_head
    v_ptr += head * v_stride_head
    grad_ptr += head * grad_stride_head
    dq_ptr += head * d_stride_head
    dk_ptr += head * d_stride_head
    dv_ptr += head * d_stride_head
    bias_ptr += (kind * NH + head) * (NP * NP)
    if COSINE:
        scale = tl.load(head_scale_ptr + head)
        grad_scale = scale * LN_2
    if DROPOUT:
        seed = tl.load(seed_ptr)
    window_row, window_col = window_in_map(
        row, col, kind, windows_per_col, windows_per_row, SHIFTED
    )
    place = relative_rows(window_row, window_col, token, H, W, WH, WW, SH, SW, PARTITIONED)
    if HOLDS_BIAS:
        bias = tl.load(bias_ptr + offset)
    dbias = tl.zeros([NP, NP], tl.float32)
    dscale = tl.zeros([NP], tl.float32)
    # within a thread in the loop: a sum over tokens would cross warps for every window. Without
    # norms the keys' sum is 0: rowsum(dS) = 0, softmax does not see what all keys have in common
    dq_sum = tl.zeros([NP // 16, 8, BLOCK_D], tl.float32)
    dk_sum = tl.zeros([NP // 16, 8, BLOCK_D], tl.float32)
    dv_sum = tl.zeros([NP // 16, 8, BLOCK_D], tl.float32)

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
        at_d = image * q_stride_image + start * q_stride_row
        if PARTITIONED:  # in image order dqkv has the strides of qkv
            at_d = image * d_stride_image + start * d_stride_row
        do = load_live_rows(
            grad_ptr + image * grad_stride_image + start * grad_stride_row, place, real,
            grad_stride_row, D, BLOCK_D,
        )  # fmt: skip
        q_norm = inverse_norm(q) if COSINE else 1.0
        k_norm = inverse_norm(k) if COSINE else 1.0
        s = scaled_products(q, q_norm, k, k_norm, scale, COSINE, PRECISION)
        if HOLDS_BIAS:
            s += bias
        else:
            s += tl.load(bias_ptr + offset)
        if HAS_MASK:
            m = tl.load(mask_ptr + window % num_masks * (NP * NP) + offset)
            s = tl.where(m == -float("inf"), m, s + m)  # a hidden NaN stays hidden
        row_max = tl.max(s, 1)
        row_max = tl.where(row_max == -float("inf"), 0.0, row_max)
        p = power_of_2(s - row_max[:, None], exact)
        p = p * inverse_sum(tl.sum(p, 1), exact)[:, None]
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        kept = p
        if DROPOUT:
            weights = dropout_weights(
                seed, window.to(tl.int32), head, token[:, None], token[None, :], drop_threshold,
                keep_factor,
            )  # fmt: skip
            kept = p * weights
            dp = dp * weights
        if NEEDS_V or NEEDS_PAD or NEEDS_SUM:
            dv = tl.dot(tl.trans(kept.to(v.dtype)), do, input_precision=PRECISION)
            if NEEDS_SUM:
                dv_sum += _pair_rows(dv)
            if NEEDS_V:
                store_rows(dv_ptr + at_d, dv, place, real, d_stride_row, D, BLOCK_D)
        ds = p * (dp - tl.sum(p * dp, 1)[:, None])
        if NEEDS_BIAS:
            dbias += ds
        ds_half = ds.to(q.dtype)
        if NEEDS_Q or NEEDS_SCALE or NEEDS_SUM:
            ds_k, unit = ds_half, k
            if COSINE and wide:
                ds_k = (ds * k_norm[None, :]).to(k.dtype)
            elif COSINE:
                unit = (k.to(tl.float32) * k_norm[:, None]).to(k.dtype)
            dq = tl.dot(ds_k, unit, input_precision=PRECISION) * grad_scale
            if COSINE:
                dq, along = normalize_gradient(q, q_norm, dq)
                dscale += along
            if NEEDS_SUM:
                dq_sum += _pair_rows(dq)
            if NEEDS_Q:
                store_rows(dq_ptr + at_d, dq, place, real, d_stride_row, D, BLOCK_D)
        if NEEDS_K or NEEDS_PAD or NEEDS_SUM:
            ds_q, unit_q = ds_half, q
            if COSINE and wide:
                ds_q = (ds * q_norm[:, None]).to(q.dtype)
            elif COSINE:
                unit_q = (q.to(tl.float32) * q_norm[:, None]).to(q.dtype)
            dk = tl.dot(tl.trans(ds_q), unit_q, input_precision=PRECISION) * grad_scale
            if COSINE:
                dk, _along = normalize_gradient(k, k_norm, dk)
            if NEEDS_SUM and COSINE:
                dk_sum += _pair_rows(dk)
            if NEEDS_K:
                store_rows(dk_ptr + at_d, dk, place, real, d_stride_row, D, BLOCK_D)
            if NEEDS_PAD:
                slot_ptr = dpad_ptr + image * slots * (2 * C) + head * D
                padded = (token < N) & (place < 0)
                store_rows(slot_ptr, dk, -1 - place, padded, 2 * C, D, BLOCK_D)
                store_rows(slot_ptr + C, dv, -1 - place, padded, 2 * C, D, BLOCK_D)
        image, row, col = next_window(image, row, col, rows, cols, step_image, step_row, step_col)
    if NEEDS_BIAS:
        tl.store(dbias_ptr + (run * NH + head).to(tl.int64) * (NP * NP) + offset, dbias)
    if NEEDS_SCALE:
        tl.store(dscale_ptr + run * NH + head, tl.sum(dscale, 0))
    if NEEDS_SUM:
        d = tl.arange(0, BLOCK_D)
        sum_ptr = dsum_ptr + run.to(tl.int64) * (3 * C) + head * D
        tl.store(sum_ptr + d, tl.sum(tl.sum(dq_sum, 0), 0), mask=d < D)
        tl.store(sum_ptr + C + d, tl.sum(tl.sum(dk_sum, 0), 0), mask=d < D)
        tl.store(sum_ptr + 2 * C + d, tl.sum(tl.sum(dv_sum, 0), 0), mask=d < D)


def launch_runs(problem: BackwardProblem, config: WholeBackwardConfig) -> Partials:
    """Launch; gradients of q, k, v are in the problem's tensors afterwards."""
    shape, needs, grad = problem.shape, problem.needs, problem.grad
    runs = plan_runs(shape, config.programs)
    heads, D, NP = shape.heads, shape.head_dim, problem.bias.shape[-1]

    def sums(*sizes: int) -> torch.Tensor:
        return torch.empty(runs.total, *sizes, dtype=torch.float32, device=grad.device)

    dbias = sums(heads, NP, NP) if needs.bias else None
    dscale = sums(heads) if needs.logit_scale else None
    dsum = sums(3, heads, D) if needs.qkv_sum else None
    dpad = problem.new_padding_gradient()
    launch(
        _window_attention_bwd_runs_kernel, runs.total * heads,
        problem.q, problem.k, problem.v, grad, problem.dq, problem.dk, problem.dv,
        grad if dbias is None else dbias, grad if dscale is None else dscale, dpad,
        grad if dsum is None else dsum, *problem.tables, *problem.extents, *runs.arguments,
        shape.padding_slots, *flatten_strides(problem.strides), **problem.constants,
        NEEDS_Q=needs.q, NEEDS_K=needs.k, NEEDS_V=needs.v, NEEDS_BIAS=needs.bias,
        NEEDS_SCALE=needs.logit_scale, NEEDS_PAD=needs.pad, NEEDS_SUM=needs.qkv_sum,
        HOLDS_BIAS=config.holds_bias, NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return Partials(dbias, dscale, dpad if needs.pad else None, dsum)
