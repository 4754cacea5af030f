"""Window attention backward for windows of 144 tokens in runs of one kind: one pass, one kernel.

    P = exp2(S - max) / sum     delta = rowsum(dO * O)     dS = P * (dO V^T - delta)
    dV = P^T dO                 dq = scale * dS k          dk = scale * dS^T q
    dbias = sum of dS over windows

A program has one head and a run of windows of one kind (runs.py) and reads the forward's output and
row statistics. It holds dbias of all pairs in registers, 81 a thread: five products, nothing is
computed twice, where tiles of queries and of keys take seven or nine (backward_rows.py,
backward_tiles.py). Tokens are cut into MAIN + TAIL (128 + 16), pairs into four tiles:

    main queries x main keys    main queries x tail keys
    main keys x tail queries    tail queries x tail keys

The third is transposed: with 16 rows every warp would compute and hold the whole of it. The tail's
own dk and dv come last, so that they are not held meanwhile. The bias is read from L2 by every
window. How many runs there are depends on the shape alone: every card gives the same bits.

Bytes: 8 * tokens * C * itemsize (qkv, O and dO read, dqkv written).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.launch import launch
from fastswin.ops.window_attention.backward_config import PassBackwardConfig
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
def _weights(
    a, a_norm, b, b_norm, da, db, row_max, row_scale, delta, scale, bias_ptr, offset, inside,
    COSINE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P and dS of one tile ``a x b``; statistics, delta and ``inside`` broadcast to it."""
    exact: tl.constexpr = a.dtype == tl.float32 and PRECISION == "ieee"
    s = scaled_products(a, a_norm, b, b_norm, scale, COSINE, PRECISION)
    s += tl.load(bias_ptr + offset, mask=inside, other=-float("inf")).to(tl.float32)
    dp = tl.dot(da, tl.trans(db), input_precision=PRECISION)
    p = power_of_2(s - row_max, exact) * row_scale
    return p, p * (dp - delta)


@triton.jit
def _over_norms(ds, norm, x, COSINE: tl.constexpr):
    """dS as an operand beside the rows ``x``: over their norms, unless ``_unit`` takes those.

    fp16 cannot hold dS over a small norm; elsewhere that takes fewer instructions.
    """
    if COSINE and x.dtype != tl.float16:
        ds = ds * norm
    return ds.to(x.dtype)


@triton.jit
def _unit(x, norm, COSINE: tl.constexpr):
    """Rows as an operand beside dS."""
    if COSINE and x.dtype == tl.float16:
        x = (x.to(tl.float32) * norm[:, None]).to(x.dtype)
    return x


@triton.jit
def _across(norm, COSINE: tl.constexpr):
    """Norms of a tile's columns; V1 has none."""
    return norm[None, :] if COSINE else norm


@triton.jit
def _down(norm, COSINE: tl.constexpr):
    """Norms of a tile's rows; V1 has none."""
    return norm[:, None] if COSINE else norm


@triton.jit
def _load_tokens(
    q_ptr, k_ptr, v_ptr, grad_ptr, out_ptr, stats_ptr, place, token,
    q_stride_row, k_stride_row, v_stride_row, grad_stride_row, out_stride_row,
    N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, COSINE: tl.constexpr,
):  # fmt: skip
    """q, k, v, dO of some tokens, their statistics, delta, and the inverse norms of q and k."""
    known = token < N
    q = load_live_rows(q_ptr, place, known, q_stride_row, D, BLOCK_D)
    k = load_live_rows(k_ptr, place, known, k_stride_row, D, BLOCK_D)
    v = load_live_rows(v_ptr, place, known, v_stride_row, D, BLOCK_D)
    do = load_live_rows(grad_ptr, place, known, grad_stride_row, D, BLOCK_D)
    o = load_live_rows(out_ptr, place, known, out_stride_row, D, BLOCK_D)
    row_max, row_scale = load_row_stats(stats_ptr, token, known)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    q_norm = inverse_norm(q) if COSINE else 1.0
    k_norm = inverse_norm(k) if COSINE else 1.0
    return q, k, v, do, row_max, row_scale, delta, q_norm, k_norm


@triton.jit(do_not_specialize=RUN_ARGUMENTS)
def _window_attention_bwd_pass_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, out_ptr, stats_ptr, dq_ptr, dk_ptr, dv_ptr,
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
    NEEDS_BIAS: tl.constexpr, NEEDS_SCALE: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (run, head)."""
    SHIFTED: tl.constexpr = SH + SW > 0
    head = tl.program_id(0) % NH
    run = tl.program_id(0) // NH
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
    # 1: main, 2: tail
    token1 = tl.arange(0, MAIN)
    token2 = MAIN + tl.arange(0, TAIL)
    map_row, map_col = window_in_map(row, col, kind, windows_per_col, windows_per_row, SHIFTED)
    place1 = relative_rows(map_row, map_col, token1, H, W, WH, WW, SH, SW, PARTITIONED)
    place2 = relative_rows(map_row, map_col, token2, H, W, WH, WW, SH, SW, PARTITIONED)
    offset11 = token1[:, None] * NP + token1[None, :]
    offset12 = token1[:, None] * NP + token2[None, :]
    offset21 = token2[None, :] * NP + token1[:, None]  # transposed: keys x queries
    offset22 = token2[:, None] * NP + token2[None, :]
    in_table = token2 < NP
    sum11 = tl.zeros([MAIN, MAIN], tl.float32)
    sum12 = tl.zeros([MAIN, TAIL], tl.float32)
    sum21 = tl.zeros([MAIN, TAIL], tl.float32)
    sum22 = tl.zeros([TAIL, TAIL], tl.float32)
    dscale1 = tl.zeros([MAIN], tl.float32)
    dscale2 = tl.zeros([TAIL], tl.float32)

    for _ in tl.range(0, count, num_stages=NUM_STAGES):
        window_row, window_col = window_in_map(
            row, col, kind, windows_per_col, windows_per_row, SHIFTED
        )
        window = (image * windows_per_col + window_row) * windows_per_row + window_col
        start = first_row(window_row, window_col, W, WH, WW, PARTITIONED).to(tl.int64)
        qw_ptr = q_ptr + image * q_stride_image + start * q_stride_row
        kw_ptr = k_ptr + image * k_stride_image + start * k_stride_row
        vw_ptr = v_ptr + image * v_stride_image + start * v_stride_row
        gw_ptr = grad_ptr + image * grad_stride_image + start * grad_stride_row
        ow_ptr = out_ptr + image * out_stride_image + start * out_stride_row
        at_d = image * d_stride_image + start * d_stride_row
        stats_window = stats_ptr + 2 * ((window * NH + head) * N)
        q1, k1, v1, do1, row_max1, row_scale1, delta1, q_norm1, k_norm1 = _load_tokens(
            qw_ptr, kw_ptr, vw_ptr, gw_ptr, ow_ptr, stats_window, place1, token1, q_stride_row,
            k_stride_row, v_stride_row, grad_stride_row, out_stride_row, N, D, BLOCK_D, COSINE,
        )  # fmt: skip
        q2, k2, v2, do2, row_max2, row_scale2, delta2, q_norm2, k_norm2 = _load_tokens(
            qw_ptr, kw_ptr, vw_ptr, gw_ptr, ow_ptr, stats_window, place2, token2, q_stride_row,
            k_stride_row, v_stride_row, grad_stride_row, out_stride_row, N, D, BLOCK_D, COSINE,
        )  # fmt: skip

        p, ds = _weights(
            q1, q_norm1, k1, k_norm1, do1, v1, row_max1[:, None], row_scale1[:, None],
            delta1[:, None], scale, bias_ptr, offset11, (token1 < NP)[:, None], COSINE, PRECISION,
        )  # fmt: skip
        if NEEDS_BIAS:
            sum11 += ds
        dv1 = tl.dot(tl.trans(p.to(do1.dtype)), do1, input_precision=PRECISION)
        dk1 = tl.dot(
            tl.trans(_over_norms(ds, _down(q_norm1, COSINE), q1, COSINE)),
            _unit(q1, q_norm1, COSINE), input_precision=PRECISION,
        )  # fmt: skip
        dq1 = tl.dot(
            _over_norms(ds, _across(k_norm1, COSINE), k1, COSINE), _unit(k1, k_norm1, COSINE),
            input_precision=PRECISION,
        )  # fmt: skip

        pt, dst = _weights(
            k1, k_norm1, q2, q_norm2, v1, do2, row_max2[None, :], row_scale2[None, :],
            delta2[None, :], scale, bias_ptr, offset21, in_table[None, :], COSINE, PRECISION,
        )  # fmt: skip
        if NEEDS_BIAS:
            sum21 += dst
        dv1 = tl.dot(pt.to(do2.dtype), do2, dv1, input_precision=PRECISION)
        dk1 = tl.dot(
            _over_norms(dst, _across(q_norm2, COSINE), q2, COSINE), _unit(q2, q_norm2, COSINE),
            dk1, input_precision=PRECISION,
        )  # fmt: skip
        dk1 = dk1 * grad_scale
        if COSINE:
            dk1, _along = normalize_gradient(k1, k_norm1, dk1)
        if NEEDS_V:
            store_rows(dv_ptr + at_d, dv1, place1, token1 < N, d_stride_row, D, BLOCK_D)
        if NEEDS_K:
            store_rows(dk_ptr + at_d, dk1, place1, token1 < N, d_stride_row, D, BLOCK_D)

        pc, dsc = _weights(
            q1, q_norm1, k2, k_norm2, do1, v2, row_max1[:, None], row_scale1[:, None],
            delta1[:, None], scale, bias_ptr, offset12, in_table[None, :], COSINE, PRECISION,
        )  # fmt: skip
        if NEEDS_BIAS:
            sum12 += dsc
        dq1 = tl.dot(
            _over_norms(dsc, _across(k_norm2, COSINE), k2, COSINE), _unit(k2, k_norm2, COSINE),
            dq1, input_precision=PRECISION,
        )  # fmt: skip
        dq1 = dq1 * grad_scale
        if COSINE:
            dq1, along1 = normalize_gradient(q1, q_norm1, dq1)
            dscale1 += along1
        if NEEDS_Q:
            store_rows(dq_ptr + at_d, dq1, place1, token1 < N, d_stride_row, D, BLOCK_D)

        pd, dsd = _weights(
            q2, q_norm2, k2, k_norm2, do2, v2, row_max2[:, None], row_scale2[:, None],
            delta2[:, None], scale, bias_ptr, offset22, in_table[:, None] & in_table[None, :],
            COSINE, PRECISION,
        )  # fmt: skip
        if NEEDS_BIAS:
            sum22 += dsd
        # read again: products of 16 rows take operands from registers, where those of the first
        # load would be held for the whole of a window, 16 registers each
        do1_again = load_live_rows(gw_ptr, place1, token1 < N, grad_stride_row, D, BLOCK_D)
        dv2 = tl.dot(tl.trans(pc.to(do1.dtype)), do1_again, input_precision=PRECISION)
        dv2 = tl.dot(tl.trans(pd.to(do2.dtype)), do2, dv2, input_precision=PRECISION)
        if NEEDS_V:
            store_rows(dv_ptr + at_d, dv2, place2, token2 < N, d_stride_row, D, BLOCK_D)
        q1_again = load_live_rows(qw_ptr, place1, token1 < N, q_stride_row, D, BLOCK_D)
        dk2 = tl.dot(
            tl.trans(_over_norms(dsc, _down(q_norm1, COSINE), q1, COSINE)),
            _unit(q1_again, q_norm1, COSINE), input_precision=PRECISION,
        )  # fmt: skip
        dk2 = tl.dot(
            tl.trans(_over_norms(dsd, _down(q_norm2, COSINE), q2, COSINE)),
            _unit(q2, q_norm2, COSINE), dk2, input_precision=PRECISION,
        )  # fmt: skip
        dk2 = dk2 * grad_scale
        if COSINE:
            dk2, _along = normalize_gradient(k2, k_norm2, dk2)
        if NEEDS_K:
            store_rows(dk_ptr + at_d, dk2, place2, token2 < N, d_stride_row, D, BLOCK_D)
        k1_again = load_live_rows(kw_ptr, place1, token1 < N, k_stride_row, D, BLOCK_D)
        dq2 = tl.dot(
            tl.trans(_over_norms(dst, _down(k_norm1, COSINE), k1, COSINE)),
            _unit(k1_again, k_norm1, COSINE), input_precision=PRECISION,
        )  # fmt: skip
        dq2 = tl.dot(
            _over_norms(dsd, _across(k_norm2, COSINE), k2, COSINE), _unit(k2, k_norm2, COSINE),
            dq2, input_precision=PRECISION,
        )  # fmt: skip
        dq2 = dq2 * grad_scale
        if COSINE:
            dq2, along2 = normalize_gradient(q2, q_norm2, dq2)
            dscale2 += along2
        if NEEDS_Q:
            store_rows(dq_ptr + at_d, dq2, place2, token2 < N, d_stride_row, D, BLOCK_D)
        image, row, col = next_window(image, row, col, rows, cols, step_image, step_row, step_col)

    if NEEDS_BIAS:
        dbias_ptr += (run * NH + head).to(tl.int64) * (N * N)
        known1 = token1 < N
        known2 = token2 < N
        tl.store(
            dbias_ptr + token1[:, None] * N + token1[None, :], sum11,
            mask=known1[:, None] & known1[None, :],
        )  # fmt: skip
        tl.store(
            dbias_ptr + token1[:, None] * N + token2[None, :], sum12,
            mask=known1[:, None] & known2[None, :],
        )  # fmt: skip
        tl.store(
            dbias_ptr + token2[None, :] * N + token1[:, None], sum21,
            mask=known1[:, None] & known2[None, :],
        )  # fmt: skip
        tl.store(
            dbias_ptr + token2[:, None] * N + token2[None, :], sum22,
            mask=known2[:, None] & known2[None, :],
        )  # fmt: skip
    if NEEDS_SCALE:
        tl.store(dscale_ptr + run * NH + head, tl.sum(dscale1, 0) + tl.sum(dscale2, 0))


def launch_pass(problem: BackwardProblem, config: PassBackwardConfig) -> Partials:
    """Launch; gradients of q, k, v are in the problem's tensors afterwards."""
    shape, needs, grad = problem.shape, problem.needs, problem.grad
    assert problem.row_stats is not None
    assert problem.out is not None
    heads, N = shape.heads, shape.tokens
    runs = plan_runs(shape, config.programs)

    def sums(*sizes: int) -> torch.Tensor:
        return torch.empty(runs.total, *sizes, dtype=torch.float32, device=grad.device)

    dbias = sums(heads, N, N) if needs.bias else None
    dscale = sums(heads) if needs.logit_scale else None
    bias, _, head_scale, _, _, scale, grad_scale, _, _ = problem.tables
    constants = problem.constants
    for unused in ("HAS_PAD", "HAS_MASK", "DROPOUT", "WIDE"):
        del constants[unused]
    launch(
        _window_attention_bwd_pass_kernel, runs.total * heads,
        problem.q, problem.k, problem.v, grad, problem.out, problem.row_stats,
        problem.dq, problem.dk, problem.dv, grad if dbias is None else dbias,
        grad if dscale is None else dscale, bias, head_scale, scale, grad_scale,
        *problem.extents[:4], *runs.arguments, *flatten_strides(problem.strides),
        *output_strides(shape), **constants, NEEDS_Q=needs.q, NEEDS_K=needs.k,
        NEEDS_V=needs.v, NEEDS_BIAS=needs.bias, NEEDS_SCALE=needs.logit_scale,
        MAIN=config.main, TAIL=config.tail, NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return Partials(dbias, dscale, None)
