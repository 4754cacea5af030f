"""Window attention forward in Triton: one program per window and group of heads.

    qkv    [B, H, W, 3, nH, D]   image order, or q, k, v [B_, nH, N, D] when PARTITIONED
    bias   [kinds, nH, NP, NP]   (bias + shift mask) * log2(e), see packing.py
    out    [B, H, W, nH, D]      or [B_, nH, N, D]

Bytes: qkv read once, out written once (4 * tokens * C * itemsize); bias stays in L2. FLOPs:
4 * N per token and channel, 51 per byte at N = 49 in fp16, so short windows are memory bound and
what matters is loads in flight: a program walks over its heads with the next head's q, k, v
already on their way. Shift, padding and partition are address arithmetic (geometry.py); window
rows are addressed relative to their image in 32 bits, images in 64.

Training also stores the log-sum-exp of each row (log2 units, ``[windows, nH, N]`` fp32) where the
backward works in tiles, and may drop attention weights (dropout.py).

``exp2`` on pre-scaled scores, fp32 accumulation throughout. The row maximum of a row that is
entirely -inf is replaced by 0, so such a row gives zeros and no NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, multiprocessor_count, on_device
from fastswin.ops.window_attention.config import (
    WindowAttentionConfig,
    default_config,
    num_programs,
    tile_constants,
)
from fastswin.ops.window_attention.launch import (
    AttentionShape,
    Dropout,
    Strides,
    check_grid,
    dropout_arguments,
    image_shape,
    output_strides,
    partitioned_shape,
    qkv_strides,
    window_strides,
)
from fastswin.ops.window_attention.online import _window_attention_fwd_online_kernel
from fastswin.ops.window_attention.packing import LOG2_E
from fastswin.ops.window_attention.tile import (
    dropout_weights,
    inverse_norm,
    load_rows,
    locate_window,
    scores,
    store_rows,
    token_rows,
)

Pair = tuple[int, int]


@triton.jit
def _window_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, bias_ptr, mask_ptr, head_scale_ptr, pad_ptr, seed_ptr,
    scale, drop_threshold, keep_factor,
    H, W, windows_per_col, windows_per_row, num_masks,
    q_stride_image, q_stride_row, q_stride_head,
    k_stride_image, k_stride_row, k_stride_head,
    v_stride_image, v_stride_row, v_stride_head,
    out_stride_image, out_stride_row, out_stride_head,
    N: tl.constexpr, NP: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr, HAS_PAD: tl.constexpr, COSINE: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_LSE: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_Q: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    HEADS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (window, HEADS heads); the whole row of keys in tiles K1 + K2."""
    pid = tl.program_id(0)
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
        head_scale = scale
        if COSINE:
            head_scale = tl.load(head_scale_ptr + head)
        bias_head = bias_ptr + head * (NP * NP)
        for q_start in tl.range(0, N, BLOCK_Q):
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
            p1 = tl.exp2(s1 - row_max[:, None])
            total = tl.sum(p1, 1)
            if DROPOUT:
                p1 *= dropout_weights(
                    seed, window, head, query[:, None], key1[None, :], drop_threshold, keep_factor
                )
            o = tl.dot(p1.to(v1.dtype), v1, input_precision=PRECISION)
            if K2 > 0:
                p2 = tl.exp2(s2 - row_max[:, None])
                total += tl.sum(p2, 1)
                if DROPOUT:
                    p2 *= dropout_weights(
                        seed, window, head, query[:, None], key2[None, :], drop_threshold,
                        keep_factor,
                    )  # fmt: skip
                o = tl.dot(p2.to(v2.dtype), v2, o, input_precision=PRECISION)
            if HAS_LSE:  # a row without a visible key gets +inf: its weights in the backward are 0
                lse = row_max + tl.log2(tl.where(total == 0.0, 1.0, total))
                lse = tl.where(total == 0.0, float("inf"), lse)
                lse_head = lse_ptr + (window.to(tl.int64) * NH + head) * N
                tl.store(lse_head + query, lse, mask=query < N)
            o = o / tl.where(total == 0.0, 1.0, total)[:, None]
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
    lse: torch.Tensor | None = None,
    dropout: Dropout | None = None,
) -> torch.Tensor:
    """Launch on a contiguous ``qkv [B, H, W, 3C]``; ``bias`` and ``head_scale`` are packed.

    ``lse``, an fp32 ``[windows, nH, N]``, is written where it is given.
    """
    B, H, W, channels = qkv.shape
    C = channels // 3
    if out is None:
        out = qkv.new_empty(B, H, W, C)
    if B == 0:
        return out
    shape = image_shape(qkv, num_heads, window_size, shift_size)
    if shape.padding_slots and qkv_bias is None:
        qkv_bias = qkv.new_zeros(channels)
    _launch(
        shape, (qkv, qkv[..., C:], qkv[..., 2 * C :]), out, bias, None, head_scale, qkv_bias,
        scale, [*qkv_strides(shape), output_strides(shape)], tf32, config, lse, dropout,
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
    lse: torch.Tensor | None = None,
    dropout: Dropout | None = None,
) -> torch.Tensor:
    """Launch on ``q, k, v [B_, nH, N, D]`` of any strides but the last; arguments are packed."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    strides = [window_strides(t) for t in (q, k, v, out)]
    _launch(
        partitioned_shape(q), (q, k, v), out, bias, mask, head_scale, None, scale, strides, tf32,
        config, lse, dropout,
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
    tf32: bool,
    config: WindowAttentionConfig | None,
    lse: torch.Tensor | None,
    dropout: Dropout | None,
) -> None:
    q = qkv[0]
    if config is None:
        config = default_config(
            shape.windows, shape.tokens, shape.heads, shape.head_dim, q.element_size(),
            multiprocessor_count(q.device), device_capability(q.device),
        )  # fmt: skip
    constants = shape.constants(bias, tf32, strides) | {
        "COSINE": head_scale is not None, "HAS_MASK": mask is not None,
        "HAS_LSE": lse is not None, "DROPOUT": dropout is not None,
        **tile_constants(config),
    }  # fmt: skip
    kernel = (
        _window_attention_fwd_kernel if config.key_tiles else _window_attention_fwd_online_kernel
    )
    programs = num_programs(shape.windows, shape.tokens, shape.heads, config)
    check_grid(programs)
    seed, threshold, factor = dropout_arguments(dropout, bias)
    with on_device(q.device):
        kernel[(programs,)](
            *qkv, out, lse if lse is not None else bias, bias, mask if mask is not None else bias,
            head_scale if head_scale is not None else bias,
            pad if pad is not None else bias, seed, scale * LOG2_E, threshold, factor,
            *shape.map_size, *shape.grid_size, mask.shape[0] if mask is not None else 1,
            *(s for triple in strides for s in triple), **constants, num_warps=config.num_warps,
        )  # fmt: skip
