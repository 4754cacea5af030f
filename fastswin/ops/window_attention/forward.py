"""Window attention forward in Triton: one program per window and group of heads.

    qkv    [B, H, W, 3, nH, D]   image order, or q, k, v [B_, nH, N, D] when PARTITIONED
    bias   [kinds, nH, NP, NP]   (bias + shift mask) * log2(e), or compact, see packing.py
    out    [B, H, W, nH, D]      or [B_, nH, N, D]

Bytes: qkv read once, out written once (4 * tokens * C * itemsize); bias stays in L2. FLOPs:
4 * N per token and channel, 51 per byte at N = 49 in fp16, so short windows are memory bound and
what matters is loads in flight: a program walks over its heads with the next head's q, k, v
already on their way. Many windows of one call go in runs instead (forward_runs.py). Shift, padding
and partition are address arithmetic (geometry.py); window rows are addressed relative to their
image in 32 bits, images in 64.

Training also stores two statistics of each row (``[windows, nH, N, 2]`` fp32, tile.py) where the
backward works in tiles, and may drop attention weights (dropout.py). Quantised inference reads
8-bit q, k and v, or writes an 8-bit output, or both (quantized.py): int8 scores are exact integers,
values enter their product as fp16 numbers, which hold both formats exactly.

``exp2`` on pre-scaled scores, fp32 accumulation throughout. The row maximum of a row that is
entirely -inf is replaced by 0, so such a row gives zeros and no NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, multiprocessor_count
from fastswin._triton.launch import launch
from fastswin._triton.pdl import pdl_options, prefetch_l2, wait_for_previous
from fastswin.ops.quantize import quantize
from fastswin.ops.window_attention.config import (
    MAX_RUN_WINDOW,
    WindowAttentionConfig,
    default_config,
    num_programs,
    padded_tokens,
    tile_constants,
)
from fastswin.ops.window_attention.forward_runs import launch_forward_runs
from fastswin.ops.window_attention.launch import (
    AttentionShape,
    Dropout,
    Strides,
    check_grid,
    dropout_arguments,
    image_shape,
    output_strides,
    partitioned_shape,
    products_form,
    qkv_strides,
    window_strides,
)
from fastswin.ops.window_attention.online import _window_attention_fwd_online_kernel
from fastswin.ops.window_attention.packing import LOG2_E
from fastswin.ops.window_attention.tile import (
    dropout_weights,
    finish_output,
    half_values,
    inverse_norm,
    load_rows,
    locate_window,
    operand,
    output_steps,
    power_of_2,
    product_step,
    scores,
    store_row_stats,
    store_rows,
    token_rows,
)

Pair = tuple[int, int]


@triton.jit
def _window_attention_fwd_kernel(
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
    BLOCK_Q: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    HEADS: tl.constexpr, NUM_STAGES: tl.constexpr,
    qkv_scale_ptr=None, output_scale_ptr=None, PDL: tl.constexpr = False,
    QUERY_SPLITS: tl.constexpr = 1,
):  # fmt: skip
    """One program per (window, HEADS heads); the whole row of keys in tiles K1 + K2.

    Where those are few, QUERY_SPLITS programs share the tiles of queries of one window and head.

    With ``qkv_scale_ptr`` q, k and v are 8-bit, with ``output_scale_ptr`` the output is.
    """
    exact: tl.constexpr = q_ptr.dtype.element_ty == tl.float32 and PRECISION != "tf32"
    pid = tl.program_id(0)
    first_tile = 0
    if QUERY_SPLITS > 1:
        first_tile = pid % QUERY_SPLITS
        pid = pid // QUERY_SPLITS
    head_groups: tl.constexpr = NH // HEADS
    window = pid // head_groups
    first_head = pid % head_groups * HEADS
    image, window_row, window_col, kind = locate_window(
        window, windows_per_col, windows_per_row, SH + SW > 0, PARTITIONED
    )
    q_ptr += image * q_stride_image
    k_ptr += image * k_stride_image
    v_ptr += image * v_stride_image
    out_ptr += image * out_stride_image
    bias_ptr += kind * (NH * NP * NP)
    if HAS_MASK:
        mask_ptr += (window % num_masks).to(tl.int64) * (NP * NP)
    if DROPOUT:
        seed = tl.load(seed_ptr)

    key1 = tl.arange(0, K1)
    key2 = K1 + tl.arange(0, K2 if K2 > 0 else 16)
    row1 = token_rows(
        window_row, window_col, key1, H, W, WH, WW, SH, SW, PARTITIONED, HAS_PAD, WIDE
    )
    row2 = token_rows(
        window_row, window_col, key2, H, W, WH, WW, SH, SW, PARTITIONED, HAS_PAD, WIDE
    )

    product_scale = product_step(scale, qkv_scale_ptr, COSINE)
    value_step, output_inverse = output_steps(qkv_scale_ptr, output_scale_ptr)
    prefetch_l2(bias_ptr + first_head * (NP * NP), HEADS * NP * NP, 64, PDL)
    wait_for_previous(PDL)
    for i in tl.range(0, HEADS, num_stages=NUM_STAGES):
        head = first_head + i
        pad_q = pad_ptr + head * D
        pad_k = pad_ptr + (NH + head) * D
        pad_v = pad_ptr + (2 * NH + head) * D
        kh_ptr = k_ptr + head * k_stride_head
        vh_ptr = v_ptr + head * v_stride_head
        k1 = load_rows(kh_ptr, pad_k, row1, key1, k_stride_row, N, D, BLOCK_D, HAS_PAD)
        v1 = load_rows(vh_ptr, pad_v, row1, key1, v_stride_row, N, D, BLOCK_D, HAS_PAD)
        if K2 > 0:
            k2 = load_rows(kh_ptr, pad_k, row2, key2, k_stride_row, N, D, BLOCK_D, HAS_PAD)
            v2 = load_rows(vh_ptr, pad_v, row2, key2, v_stride_row, N, D, BLOCK_D, HAS_PAD)
            v2 = half_values(v2, qkv_scale_ptr)
        v1 = half_values(v1, qkv_scale_ptr)
        head_scale = product_scale
        if COSINE:
            head_scale = tl.load(head_scale_ptr + head)
        bias_head = bias_ptr + head * (NP * NP)
        for q_start in tl.range(first_tile * BLOCK_Q, N, BLOCK_Q * QUERY_SPLITS):
            query = q_start + tl.arange(0, BLOCK_Q)
            row = token_rows(
                window_row, window_col, query, H, W, WH, WW, SH, SW, PARTITIONED, HAS_PAD, WIDE
            )
            q = load_rows(
                q_ptr + head * q_stride_head, pad_q, row, query, q_stride_row,
                N, D, BLOCK_D, HAS_PAD,
            )  # fmt: skip
            q_norm = inverse_norm(q) if COSINE else 1.0
            k1_norm = inverse_norm(k1) if COSINE else 1.0
            # rows past NP exist only where BLOCK_Q does not divide it; they are not stored
            in_table = (query < NP)[:, None] & (key1 < NP)[None, :]
            s1 = scores(
                q, q_norm, k1, k1_norm, head_scale, bias_head, mask_ptr,
                query[:, None] * NP + key1[None, :], in_table, COSINE, HAS_MASK, PRECISION,
            )  # fmt: skip
            row_max = tl.max(s1, 1)
            if K2 > 0:
                k2_norm = inverse_norm(k2) if COSINE else 1.0
                in_table = (query < NP)[:, None] & (key2 < NP)[None, :]
                s2 = scores(
                    q, q_norm, k2, k2_norm, head_scale, bias_head, mask_ptr,
                    query[:, None] * NP + key2[None, :], in_table, COSINE, HAS_MASK, PRECISION,
                )  # fmt: skip
                row_max = tl.maximum(row_max, tl.max(s2, 1))
            row_max = tl.where(row_max == -float("inf"), 0.0, row_max)
            p1 = power_of_2(s1 - row_max[:, None], exact)
            total = tl.sum(p1, 1)
            if DROPOUT:
                p1 *= dropout_weights(
                    seed, window, head, query[:, None], key1[None, :], drop_threshold, keep_factor
                )
            p1 = operand(p1.to(v1.dtype), PRECISION)
            o = tl.dot(p1, operand(v1, PRECISION), input_precision=PRECISION)
            if K2 > 0:
                p2 = power_of_2(s2 - row_max[:, None], exact)
                total += tl.sum(p2, 1)
                if DROPOUT:
                    p2 *= dropout_weights(
                        seed, window, head, query[:, None], key2[None, :], drop_threshold,
                        keep_factor,
                    )  # fmt: skip
                p2 = operand(p2.to(v2.dtype), PRECISION)
                o = tl.dot(p2, operand(v2, PRECISION), o, input_precision=PRECISION)
            if HAS_STATS:
                stats_head = stats_ptr + (window.to(tl.int64) * NH + head) * (2 * N)
                store_row_stats(stats_head, row_max, total, query, N, exact)
            o = o / tl.where(total == 0.0, 1.0, total)[:, None]
            o = finish_output(
                o, value_step, output_inverse, qkv_scale_ptr, output_scale_ptr,
                out_ptr.dtype.element_ty,
            )  # fmt: skip
            store_rows(
                out_ptr + head * out_stride_head, o, row, (query < N) & (row >= 0), out_stride_row,
                D, BLOCK_D,
            )  # fmt: skip


def window_attention_fwd(
    qkv: torch.Tensor,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    qkv_bias: torch.Tensor | None,
    scale: float,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    tf32: bool,
    out: torch.Tensor | None = None,
    config: WindowAttentionConfig | None = None,
    row_stats: torch.Tensor | None = None,
    dropout: Dropout | None = None,
    qkv_scale: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    pdl: bool = False,
    split: bool = False,
) -> torch.Tensor:
    """Launch on a contiguous ``qkv [B, H, W, 3C]``; ``bias`` and ``head_scale`` are packed.

    A compact ``bias`` is for inference: neither ``row_stats`` nor ``dropout``.
    ``row_stats``, an fp32 ``[windows, nH, N, 2]``, is written where it is given: maximum and
    1 / sum of every row (tile.py). fp32 products are IEEE, ``tf32``, or, with
    ``split``, three of TF32. An 8-bit qkv needs ``qkv_scale [3]``, an 8-bit output
    ``output_scale [1]`` (quantized.py).
    """
    B, H, W, channels = qkv.shape
    C = channels // 3
    if out is None:
        out = torch.empty(B, H, W, C, dtype=out_dtype or qkv.dtype, device=qkv.device)
    if B == 0:
        return out
    shape = image_shape(qkv, num_heads, window_size, shift_size)
    if shape.padding_slots and qkv_bias is None:
        qkv_bias = torch.zeros(channels, dtype=qkv.dtype, device=qkv.device)
    if qkv_bias is not None and qkv_scale is not None and qkv_bias.dtype != qkv.dtype:
        qkv_bias = quantize(qkv_bias, qkv_scale, qkv.dtype, impl="triton")
    _launch(
        shape, (qkv, qkv[..., C:], qkv[..., 2 * C :]), out, bias, None, head_scale, qkv_bias,
        scale, [*qkv_strides(shape), output_strides(shape)], products_form(tf32, split),
        config, row_stats, dropout, qkv_scale, output_scale, pdl,
    )  # fmt: skip
    return out


def window_attention_partitioned_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    head_scale: torch.Tensor | None,
    scale: float,
    tf32: bool,
    config: WindowAttentionConfig | None = None,
    row_stats: torch.Tensor | None = None,
    dropout: Dropout | None = None,
    split: bool = False,
) -> torch.Tensor:
    """Launch on ``q, k, v [B_, nH, N, D]`` of any strides but the last; arguments are packed."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    strides = [window_strides(t) for t in (q, k, v, out)]
    _launch(
        partitioned_shape(q), (q, k, v), out, bias, mask, head_scale, None, scale, strides,
        products_form(tf32, split), config, row_stats, dropout,
    )  # fmt: skip
    return out


def _launch(
    shape: AttentionShape,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    head_scale: torch.Tensor | None,
    pad: torch.Tensor | None,
    scale: float,
    strides: list[Strides],
    precision: str,
    config: WindowAttentionConfig | None,
    row_stats: torch.Tensor | None,
    dropout: Dropout | None,
    qkv_scale: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    q = qkv[0]
    eight_bits = qkv_scale is not None or output_scale is not None
    compact = bias.ndim == 3
    if compact and not (mask is None and row_stats is None and dropout is None):
        raise ValueError("a compact bias table takes no mask, row statistics or dropout")
    in_runs = mask is None and not eight_bits and not compact
    if config is None:
        config = default_config(
            shape.windows, shape.tokens, shape.heads, shape.head_dim, q.element_size(),
            multiprocessor_count(q.device), device_capability(q.device),
            runs=in_runs and head_scale is None and dropout is None and not shape.padding_slots,
            tensor_cores=precision != "ieee", table_itemsize=bias.element_size(),
            tf32=precision == "tf32" and q.dtype == torch.float32,
        )  # fmt: skip
    if compact and config.key_tiles:
        raise ValueError("a compact bias table needs tiles of keys: config.key_tiles == ()")
    if in_runs and config.programs and shape.tokens <= MAX_RUN_WINDOW:
        launch_forward_runs(
            shape, qkv, out, bias, head_scale, pad, scale, strides, precision, config, row_stats,
            dropout,
        )  # fmt: skip
        return
    constants = shape.constants(bias, precision, strides) | {
        "COSINE": head_scale is not None, "HAS_MASK": mask is not None,
        "HAS_STATS": row_stats is not None, "DROPOUT": dropout is not None,
        "qkv_scale_ptr": qkv_scale, "output_scale_ptr": output_scale, **tile_constants(config),
    }  # fmt: skip
    if compact:
        constants |= {"NP": padded_tokens(shape.tokens), "COMPACT_BIAS": True}
    if qkv_scale is not None:  # 8-bit products take steps of 32
        constants["BLOCK_D"] = max(32, constants["BLOCK_D"])
    kernel = (
        _window_attention_fwd_kernel if config.key_tiles else _window_attention_fwd_online_kernel
    )
    # dropout's seed is the previous kernel's
    constants |= pdl_options(pdl and dropout is None, device_capability(q.device))
    programs = num_programs(shape.windows, shape.tokens, shape.heads, config)
    check_grid(programs)
    seed, threshold, factor = dropout_arguments(dropout, bias)
    arguments = (
        *qkv, out, row_stats if row_stats is not None else bias, bias,
        mask if mask is not None else bias,
        head_scale if head_scale is not None else bias,
        pad if pad is not None else bias, seed, scale * LOG2_E, threshold, factor,
        *shape.map_size, *shape.grid_size, mask.shape[0] if mask is not None else 1,
        *(s for triple in strides for s in triple),
    )  # fmt: skip
    launch(kernel, programs, *arguments, **constants, num_warps=config.num_warps)
