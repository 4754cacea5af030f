"""Window attention forward for long windows: keys in tiles with a running maximum.

Same tensors and the same arithmetic as forward.py; one program per (window, head, query tile). With
64 queries and steps of 64 keys it needs 118 registers and 40 KiB, which rows of 256 keys exceed.

Inference of image order may have its bias compact, ``[nH, Ww, (2 Wh - 1) * Ww]`` (compact_bias.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastswin._triton.pdl import prefetch_l2, wait_for_previous
from fastswin.ops.window_attention.compact_bias import add_compact_bias
from fastswin.ops.window_attention.tile import (
    dropout_weights,
    finish_output,
    half_values,
    inverse_norm,
    inverse_sum,
    load_rows,
    locate_window,
    operand,
    output_steps,
    product_step,
    scaled_products,
    scores,
    store_row_stats,
    store_rows,
    token_rows,
)


@triton.jit
def _online_tile(
    o, running_max, total, q, q_norm, query, start, scale, seed, window, head, kind,
    window_row, window_col, H, W, k_ptr, v_ptr, pad_ptr, k_stride_row, v_stride_row,
    bias_ptr, mask_ptr, drop_threshold, keep_factor, qkv_scale_ptr, BLOCK: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr, HAS_PAD: tl.constexpr, COSINE: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_Q: tl.constexpr, COMPACT_BIAS: tl.constexpr,
):  # fmt: skip
    """Output, maximum and sum of rows with keys ``start .. start + BLOCK`` taken in."""
    # fp32 products are chains of fused multiply-adds, one after the other
    chained: tl.constexpr = v_ptr.dtype.element_ty == tl.float32 and PRECISION == "ieee"
    key = start + tl.arange(0, BLOCK)
    key_row = token_rows(
        window_row, window_col, key, H, W, WH, WW, SH, SW, PARTITIONED, HAS_PAD, WIDE
    )
    pad_k = pad_ptr + (NH + head) * D
    pad_v = pad_ptr + (2 * NH + head) * D
    k = load_rows(k_ptr, pad_k, key_row, key, k_stride_row, N, D, BLOCK_D, HAS_PAD)
    v = load_rows(v_ptr, pad_v, key_row, key, v_stride_row, N, D, BLOCK_D, HAS_PAD)
    v = half_values(v, qkv_scale_ptr)
    k_norm = inverse_norm(k) if COSINE else 1.0
    if COMPACT_BIAS:
        s = scaled_products(q, q_norm, k, k_norm, scale, COSINE, PRECISION)
        s = add_compact_bias(s, bias_ptr, query, key, kind, N, BLOCK_Q, BLOCK, WH, WW, SH, SW)
    else:
        in_table = (query < NP)[:, None] & (key < NP)[None, :]
        s = scores(
            q, q_norm, k, k_norm, scale, bias_ptr, mask_ptr, query[:, None] * NP + key[None, :],
            in_table, COSINE, HAS_MASK, PRECISION,
        )  # fmt: skip
    new_max = tl.maximum(running_max, tl.max(s, 1))
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    p = tl.exp2(s - shift[:, None])
    rescale = tl.exp2(running_max - shift)
    total = total * rescale + tl.sum(p, 1)
    if DROPOUT:
        p *= dropout_weights(
            seed, window, head, query[:, None], key[None, :], drop_threshold, keep_factor
        )
    if chained:
        # a sum per tile: one chain over all keys is further from the truth than eager's sums.
        # fma, for a plain addition is taken into the product, as its first summand
        o = tl.fma(o, rescale[:, None], tl.dot(p, v, input_precision=PRECISION))
    else:
        o = o * rescale[:, None]
        p = operand(p.to(v.dtype), PRECISION)
        o = tl.dot(p, operand(v, PRECISION), o, input_precision=PRECISION)
    return o, new_max, total


@triton.jit
def _window_attention_fwd_online_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, stats_ptr, bias_ptr, mask_ptr, head_scale_ptr, pad_ptr, seed_ptr,
    scale, drop_threshold, keep_factor,
    H, W, windows_per_col, windows_per_row, num_masks,
    q_stride_image, q_stride_row, q_stride_head,
    k_stride_image, k_stride_row, k_stride_head,
    v_stride_image, v_stride_row, v_stride_head,
    out_stride_image, out_stride_row, out_stride_head,
    N: tl.constexpr, NP: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr, HAS_PAD: tl.constexpr, COSINE: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_STATS: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    qkv_scale_ptr=None, output_scale_ptr=None, PDL: tl.constexpr = False,
    COMPACT_BIAS: tl.constexpr = False,
):  # fmt: skip
    """One program per (window, head, query tile); 8-bit operands and output as in forward.py."""
    # keys behind the last whole tile have one of their own, where that is smaller
    REST: tl.constexpr = N % BLOCK_K
    HALF: tl.constexpr = 16 if REST <= 16 else BLOCK_K // 2
    TAIL: tl.constexpr = HALF if REST > 0 and 2 * REST <= BLOCK_K else 0
    pid = tl.program_id(0)
    query_tiles: tl.constexpr = (N + BLOCK_Q - 1) // BLOCK_Q
    query = pid % query_tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    head = pid // query_tiles % NH
    window = pid // (query_tiles * NH)
    image, window_row, window_col, kind = locate_window(
        window, windows_per_col, windows_per_row, SH + SW > 0, PARTITIONED
    )
    q_ptr += image * q_stride_image + head * q_stride_head
    k_ptr += image * k_stride_image + head * k_stride_head
    v_ptr += image * v_stride_image + head * v_stride_head
    out_ptr += image * out_stride_image + head * out_stride_head
    if COMPACT_BIAS:
        bias_ptr += head * ((2 * WH - 1) * WW * WW)
    else:
        bias_ptr += (kind * NH + head) * (NP * NP)
    if HAS_MASK:
        mask_ptr += (window % num_masks).to(tl.int64) * (NP * NP)
    scale = product_step(scale, qkv_scale_ptr, COSINE)
    value_step, output_inverse = output_steps(qkv_scale_ptr, output_scale_ptr)
    if COSINE:
        scale = tl.load(head_scale_ptr + head)
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)

    row = token_rows(
        window_row, window_col, query, H, W, WH, WW, SH, SW, PARTITIONED, HAS_PAD, WIDE
    )
    first_query = pid % query_tiles * BLOCK_Q
    if COMPACT_BIAS:
        prefetch_l2(bias_ptr, (2 * WH - 1) * WW * WW, 512, PDL)
    else:
        table_rows = tl.minimum(BLOCK_Q, NP - first_query)
        prefetch_l2(bias_ptr + first_query * NP, table_rows * NP, 512, PDL)
    wait_for_previous(PDL)
    q = load_rows(q_ptr, pad_ptr + head * D, row, query, q_stride_row, N, D, BLOCK_D, HAS_PAD)
    q_norm = inverse_norm(q) if COSINE else 1.0
    running_max = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    o = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in tl.range(0, N // BLOCK_K * BLOCK_K if TAIL else N, BLOCK_K, num_stages=NUM_STAGES):
        o, running_max, total = _online_tile(
            o, running_max, total, q, q_norm, query, start, scale, seed, window, head, kind,
            window_row, window_col, H, W, k_ptr, v_ptr, pad_ptr, k_stride_row, v_stride_row,
            bias_ptr, mask_ptr, drop_threshold, keep_factor, qkv_scale_ptr, BLOCK_K,
            N, NP, NH, D, BLOCK_D, WH, WW, SH, SW, PARTITIONED, HAS_PAD, COSINE, HAS_MASK, DROPOUT,
            PRECISION, WIDE, BLOCK_Q, COMPACT_BIAS,
        )  # fmt: skip
    if TAIL > 0:
        o, running_max, total = _online_tile(
            o, running_max, total, q, q_norm, query, N // BLOCK_K * BLOCK_K, scale, seed, window,
            head, kind, window_row, window_col, H, W, k_ptr, v_ptr, pad_ptr, k_stride_row,
            v_stride_row, bias_ptr, mask_ptr, drop_threshold, keep_factor, qkv_scale_ptr, TAIL,
            N, NP, NH, D, BLOCK_D, WH, WW, SH, SW, PARTITIONED, HAS_PAD, COSINE, HAS_MASK, DROPOUT,
            PRECISION, WIDE, BLOCK_Q, COMPACT_BIAS,
        )  # fmt: skip
    if HAS_STATS:
        stats_head = stats_ptr + (window.to(tl.int64) * NH + head) * (2 * N)
        store_row_stats(stats_head, running_max, total, query, N, False)
    o = o * inverse_sum(total, False)[:, None]
    o = finish_output(
        o, value_step, output_inverse, qkv_scale_ptr, output_scale_ptr, out_ptr.dtype.element_ty
    )
    store_rows(out_ptr, o, row, (query < N) & (row >= 0), out_stride_row, D, BLOCK_D)
