"""Window attention backward for windows of up to 64 tokens: one kernel, everything in registers.

    P  = softmax(S),  S = scale * q k^T + bias + mask          recomputed, nothing was saved
    dV = P^T dO       dP = dO V^T      dS = P * (dP - rowsum(P * dP))
    dq = scale * dS k                  dk = scale * dS^T q      dbias = sum of dS over windows

with dropout, P becomes P * weights in dV, and dP is multiplied by the weights. One program walks
over a run of windows of one head (window ``c, c + runs, c + 2 runs, ...``) with the next windows'
q, k, v, dO on their way, adds dS into an ``[NP, NP]`` tile in registers, and writes that tile once.
A second stage adds the tiles in a fixed order. How many runs there are depends on the shape alone,
so that every card gives the same bits.

Bytes: 7 * tokens * C * itemsize (qkv and dO read, dqkv written). A measured prototype of this form
reached 2.6 TB/s at 56 x 56, C 96, batch 128 on an H100: three load stages were worth 23 %, a saved
log-sum-exp nothing, lower register counts cost more in spills than they gained.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.launch import launch
from fastswin.ops.window_attention.backward_config import WholeBackwardConfig, number_of_runs
from fastswin.ops.window_attention.backward_problem import (
    BackwardProblem,
    Partials,
    flatten_strides,
)
from fastswin.ops.window_attention.tile import (
    LN_2,
    dropout_weights,
    inverse_norm,
    inverse_sum,
    load_live_rows,
    load_rows,
    normalize_gradient,
    power_of_2,
    scores,
    store_rows,
    walk_to,
)


@triton.jit
def _window_attention_bwd_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dq_ptr, dk_ptr, dv_ptr, dbias_ptr, dscale_ptr, dpad_ptr,
    dsum_ptr, bias_ptr, mask_ptr, head_scale_ptr, pad_ptr, seed_ptr,
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
    NEEDS_Q: tl.constexpr, NEEDS_K: tl.constexpr, NEEDS_V: tl.constexpr,
    NEEDS_BIAS: tl.constexpr, NEEDS_SCALE: tl.constexpr, NEEDS_PAD: tl.constexpr,
    NEEDS_SUM: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (run of windows, head)."""
    exact: tl.constexpr = q_ptr.dtype.element_ty == tl.float32 and PRECISION == "ieee"
    pid = tl.program_id(0)
    head = pid % NH
    run = pid // NH
    C: tl.constexpr = NH * D
    token = tl.arange(0, NP)
    in_table = (token < NP)[:, None] & (token < NP)[None, :]
    offset = token[:, None] * NP + token[None, :]
    q_ptr += head * q_stride_head
    k_ptr += head * k_stride_head
    v_ptr += head * v_stride_head
    grad_ptr += head * grad_stride_head
    dq_ptr += head * d_stride_head
    dk_ptr += head * d_stride_head
    dv_ptr += head * d_stride_head
    bias_ptr += head * (NP * NP)
    if COSINE:
        scale = tl.load(head_scale_ptr + head)
        grad_scale = scale * LN_2
    if DROPOUT:
        seed = tl.load(seed_ptr)
    dbias = tl.zeros([NP, NP], tl.float32)
    dscale = tl.zeros([NP], tl.float32)
    # element-wise in the loop: a sum over tokens would cross warps for every window. Without norms
    # the keys' sum is 0: rowsum(dS) = 0, softmax does not see what all keys have in common
    dq_sum = tl.zeros([NP, BLOCK_D], tl.float32)
    dk_sum = tl.zeros([NP, BLOCK_D], tl.float32)
    dv_sum = tl.zeros([NP, BLOCK_D], tl.float32)

    for i in tl.range(0, steps, num_stages=NUM_STAGES):
        # past the last window everything is read again and multiplied with a gradient of zero
        window, image, _row, _col, kind, row, live, real = walk_to(
            run + i * runs, windows, token, H, W, windows_per_col, windows_per_row,
            N, WH, WW, SH, SW, PARTITIONED, HAS_PAD, WIDE,
        )  # fmt: skip
        q = load_rows(
            q_ptr + image * q_stride_image, pad_ptr + head * D, row, token, q_stride_row,
            N, D, BLOCK_D, HAS_PAD,
        )  # fmt: skip
        k = load_rows(
            k_ptr + image * k_stride_image, pad_ptr + C + head * D, row, token, k_stride_row,
            N, D, BLOCK_D, HAS_PAD,
        )  # fmt: skip
        v = load_rows(
            v_ptr + image * v_stride_image, pad_ptr + 2 * C + head * D, row, token, v_stride_row,
            N, D, BLOCK_D, HAS_PAD,
        )  # fmt: skip
        do = load_live_rows(
            grad_ptr + image * grad_stride_image, row, real, grad_stride_row, D, BLOCK_D
        )
        q_norm = inverse_norm(q) if COSINE else 1.0
        k_norm = inverse_norm(k) if COSINE else 1.0
        mask_window = mask_ptr
        if HAS_MASK:
            mask_window = mask_ptr + (window % num_masks).to(tl.int64) * (NP * NP)
        s = scores(
            q, q_norm, k, k_norm, scale, bias_ptr + kind * (NH * NP * NP), mask_window, offset,
            in_table, COSINE, HAS_MASK, PRECISION,
        )  # fmt: skip
        row_max = tl.max(s, 1)
        row_max = tl.where(row_max == -float("inf"), 0.0, row_max)
        p = power_of_2(s - row_max[:, None], exact)
        total = tl.sum(p, 1)
        p = p * inverse_sum(total, exact)[:, None]
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        kept = p
        if DROPOUT:
            weights = dropout_weights(
                seed, window, head, token[:, None], token[None, :], drop_threshold, keep_factor
            )
            kept = p * weights
            dp = dp * weights
        d_image = image * d_stride_image
        if NEEDS_V or NEEDS_PAD or NEEDS_SUM:
            dv = tl.dot(tl.trans(kept.to(v.dtype)), do, input_precision=PRECISION)
            if NEEDS_SUM:
                dv_sum += dv
            if NEEDS_V:
                store_rows(dv_ptr + d_image, dv, row, real, d_stride_row, D, BLOCK_D)
        ds = p * (dp - tl.sum(p * dp, 1)[:, None])
        if NEEDS_BIAS:
            dbias += ds
        ds_half = ds.to(q.dtype)
        if NEEDS_Q or NEEDS_SCALE or NEEDS_SUM:
            unit = k
            if COSINE:
                unit = (k.to(tl.float32) * k_norm[:, None]).to(k.dtype)
            dq = tl.dot(ds_half, unit, input_precision=PRECISION) * grad_scale
            if COSINE:
                dq, along = normalize_gradient(q, q_norm, dq)
                dscale += along
            if NEEDS_SUM:
                dq_sum += dq
            if NEEDS_Q:
                store_rows(dq_ptr + d_image, dq, row, real, d_stride_row, D, BLOCK_D)
        if NEEDS_K or NEEDS_PAD or NEEDS_SUM:
            unit_q = q
            if COSINE:
                unit_q = (q.to(tl.float32) * q_norm[:, None]).to(q.dtype)
            dk = tl.dot(tl.trans(ds_half), unit_q, input_precision=PRECISION) * grad_scale
            if COSINE:
                dk, _ = normalize_gradient(k, k_norm, dk)
            if NEEDS_SUM and COSINE:
                dk_sum += dk
            if NEEDS_K:
                store_rows(dk_ptr + d_image, dk, row, real, d_stride_row, D, BLOCK_D)
            if NEEDS_PAD:
                slot_ptr = dpad_ptr + image * slots * (2 * C) + head * D
                padded = live & (row < 0)
                store_rows(slot_ptr, dk, -1 - row, padded, 2 * C, D, BLOCK_D)
                store_rows(slot_ptr + C, dv, -1 - row, padded, 2 * C, D, BLOCK_D)
    if NEEDS_BIAS:
        tl.store(dbias_ptr + (run * NH + head).to(tl.int64) * (NP * NP) + offset, dbias)
    if NEEDS_SCALE:
        tl.store(dscale_ptr + run * NH + head, tl.sum(dscale, 0))
    if NEEDS_SUM:
        d = tl.arange(0, BLOCK_D)
        sum_ptr = dsum_ptr + run.to(tl.int64) * (3 * C) + head * D
        tl.store(sum_ptr + d, tl.sum(dq_sum, 0), mask=d < D)
        tl.store(sum_ptr + C + d, tl.sum(dk_sum, 0), mask=d < D)
        tl.store(sum_ptr + 2 * C + d, tl.sum(dv_sum, 0), mask=d < D)


def launch_whole(problem: BackwardProblem, config: WholeBackwardConfig) -> Partials:
    """Launch; gradients of q, k, v are in the problem's tensors afterwards."""
    shape, needs, grad = problem.shape, problem.needs, problem.grad
    runs = number_of_runs(config.programs, shape.heads, shape.windows)
    steps = -(-shape.windows // runs)
    dbias = dscale = dsum = grad
    NP = problem.bias.shape[-1]
    if needs.bias:
        dbias = torch.empty(
            runs, shape.heads, NP, NP, dtype=torch.float32, device=grad.device
        )  # fmt: skip
    if needs.logit_scale:
        dscale = torch.empty(runs, shape.heads, dtype=torch.float32, device=grad.device)
    if needs.qkv_sum:
        dsum = torch.empty(
            runs, 3, shape.heads, shape.head_dim, dtype=torch.float32, device=grad.device
        )
    dpad = problem.new_padding_gradient()
    launch(
        _window_attention_bwd_kernel, runs * shape.heads,
        problem.q, problem.k, problem.v, grad, problem.dq, problem.dk, problem.dv, dbias,
        dscale, dpad, dsum, *problem.tables, *problem.extents, shape.windows, runs, steps,
        shape.padding_slots, *flatten_strides(problem.strides), **problem.constants,
        NEEDS_Q=needs.q, NEEDS_K=needs.k, NEEDS_V=needs.v, NEEDS_BIAS=needs.bias,
        NEEDS_SCALE=needs.logit_scale, NEEDS_PAD=needs.pad,
        NEEDS_SUM=needs.qkv_sum, NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return Partials(
        dbias if needs.bias else None,
        dscale if needs.logit_scale else None,
        dpad if needs.pad else None,
        dsum if needs.qkv_sum else None,
    )
