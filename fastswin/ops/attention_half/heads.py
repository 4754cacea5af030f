"""LayerNorm, qkv and window attention of one window and head, for few windows.

    x, out [B, H, W, C]   weight [3C, C]   vectors [3, 3C] fp32 (packing.py)
    norm_stats [2, PARTS, B H W] fp32 (ops/linear/stats.py)
    bias [kinds, nH, NP, NP], head_scale [nH], pad [3C] as ops/window_attention has them

At batch 1 launches bound a Swin; this one stands for two or three. A program multiplies its
window's rows (49, padded to 64) with the weights of its heads and attends at once; q, k and v never
leave it. 6 N C D FLOPs of projections a head and window, of which a batch of one image gives the
multiprocessors 24 to 192; bytes from L2: the window's rows and ``3 D C`` weights a head.

x and weights walk by in steps of channels, statistics from the product that wrote x or from a pass
of their own (sums taken from the operand of a pipelined product were wrong under Triton 3.6).
Keeping whole rows on chip instead, the weights in shared memory before the wait, was 3 % faster and
a race: products outside a pipelined loop gave other results from run to run (Triton 3.6, H200).

Statistics around a pivot, the row's own first value: sum and sum of squares in one pass, and since
no value lies further than ``sqrt(C)`` deviations from the mean, cancellation costs at most a factor
of C on fp32's rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, on_device
from fastswin._triton.launch import on_grid
from fastswin._triton.pdl import pdl_options, prefetch_l2, wait_for_previous
from fastswin._triton.row_statistics import joined_stats
from fastswin._triton.tiles import cdiv, next_power_of_2
from fastswin.ops.attention_half.config import (
    HeadsConfig,
    default_heads_config,
    row_tile,
)
from fastswin.ops.attention_half.tile import (
    add_row,
    attend,
    load_parts,
    locate_rows,
)
from fastswin.ops.window_attention.geometry import num_windows
from fastswin.ops.window_attention.launch import check_grid
from fastswin.ops.window_attention.packing import LOG2_E

Pair = tuple[int, int]


@triton.jit
def _sums(part, pivot):
    """Sum and sum of squares of each row's part around its pivot."""
    part = part.to(tl.float32) - pivot[:, None]
    return tl.sum(part, 1), tl.sum(part * part, 1)


@triton.jit
def _mean_and_rstd(total, square, pivot, live, eps, C: tl.constexpr):
    """From sums around the pivot; ``rstd`` is 0 in rows without a token, so their q, k, v are b."""
    mean = total / C
    variance = tl.maximum(square / C - mean * mean, 0.0)
    return mean + pivot, tl.where(live, 1.0 / tl.sqrt(variance + eps), 0.0)


@triton.jit
def _finish(acc, vectors_ptr, pad_ptr, at, mean, rstd, padded, C: tl.constexpr,
            DTYPE: tl.constexpr, NORMALIZE: tl.constexpr, HAS_OFFSET: tl.constexpr,
            HAS_PAD: tl.constexpr):  # fmt: skip
    """Behind a product: LayerNorm by its row statistics, bias, and the qkv of padded tokens."""
    if NORMALIZE:
        if HAS_OFFSET:
            acc += tl.load(vectors_ptr + 6 * C + at)[None, :]
        acc = (acc - mean[:, None] * tl.load(vectors_ptr + 3 * C + at)[None, :]) * rstd[:, None]
    acc += tl.load(vectors_ptr + at)[None, :]
    if HAS_PAD:
        acc = tl.where(padded[:, None], tl.load(pad_ptr + at).to(tl.float32)[None, :], acc)
    return acc.to(DTYPE)


@triton.jit
def _heads_kernel(
    x_ptr, weight_ptr, vectors_ptr, offset_ptr, bias_ptr, head_scale_ptr, pad_ptr, out_ptr,
    scale, eps, H, W, windows_per_col, windows_per_row,
    C: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    HAS_PAD: tl.constexpr, HAS_OFFSET: tl.constexpr, NORMALIZE: tl.constexpr,
    COSINE: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    LINES: tl.constexpr, PDL: tl.constexpr, stats_ptr=None, tokens=0, PARTS: tl.constexpr = 0,
):  # fmt: skip
    """One program per (window, head), heads fastest; channels in steps of BLOCK_K."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    head = tl.program_id(0) % NH
    first = head * D
    token = tl.arange(0, NP)
    start, at, live, padded, kind = locate_rows(
        tl.program_id(0) // NH, token, H, W, windows_per_col, windows_per_row, C,
        N, WH, WW, SH, SW, HAS_PAD,
    )  # fmt: skip
    x_ptr += start
    out_ptr += start
    prefetch_l2(weight_ptr + first * C, D * C, LINES, PDL)
    prefetch_l2(weight_ptr + (C + first) * C, D * C, LINES, PDL)
    prefetch_l2(weight_ptr + (2 * C + first) * C, D * C, LINES, PDL)
    bias_ptr += (kind * NH + head) * (NP * NP)
    prefetch_l2(bias_ptr, NP * NP, 64, PDL)
    wait_for_previous(PDL)
    mean = 0.0
    rstd = 1.0
    if NORMALIZE and PARTS > 0:
        mean, rstd = joined_stats(stats_ptr, start // C + at // C, live, tokens, eps, C, PARTS)
    elif NORMALIZE:
        pivot = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
        total = tl.zeros([NP], tl.float32)
        square = tl.zeros([NP], tl.float32)
        for first_col in tl.range(0, C, BLOCK_K, num_stages=NUM_STAGES):
            part, _, _ = load_parts(x_ptr + first_col, at, live, BLOCK_K, 1)
            if HAS_OFFSET:
                part, _, _ = add_row(part, part, part, offset_ptr + first_col, BLOCK_K, 1)
            part_total, part_square = _sums(part, pivot)
            total += part_total
            square += part_square
        mean, rstd = _mean_and_rstd(total, square, pivot, live, eps, C)
    d = tl.arange(0, D)
    c = tl.arange(0, BLOCK_K)
    strip = (first + d)[:, None] * C + c[None, :]
    q_acc = tl.zeros([NP, D], tl.float32)
    k_acc = tl.zeros([NP, D], tl.float32)
    v_acc = tl.zeros([NP, D], tl.float32)
    for k_start in tl.range(0, C, BLOCK_K, num_stages=NUM_STAGES):
        x = tl.load(x_ptr + at[:, None] + (k_start + c)[None, :], mask=live[:, None], other=0.0)
        wq = tl.load(weight_ptr + strip + k_start)
        wk = tl.load(weight_ptr + C * C + strip + k_start)
        wv = tl.load(weight_ptr + 2 * C * C + strip + k_start)
        q_acc = tl.dot(x, tl.trans(wq), q_acc)
        k_acc = tl.dot(x, tl.trans(wk), k_acc)
        v_acc = tl.dot(x, tl.trans(wv), v_acc)
    q = _finish(q_acc, vectors_ptr, pad_ptr, first + d, mean, rstd, padded, C, DTYPE, NORMALIZE,
                HAS_OFFSET, HAS_PAD)  # fmt: skip
    k = _finish(k_acc, vectors_ptr, pad_ptr, C + first + d, mean, rstd, padded, C, DTYPE,
                NORMALIZE, HAS_OFFSET, HAS_PAD)  # fmt: skip
    v = _finish(v_acc, vectors_ptr, pad_ptr, 2 * C + first + d, mean, rstd, padded, C, DTYPE,
                NORMALIZE, HAS_OFFSET, HAS_PAD)  # fmt: skip
    if COSINE:
        scale = tl.load(head_scale_ptr + head)
    bias = tl.load(bias_ptr + token[:, None] * NP + token[None, :])
    o = attend(q, k, v, bias, scale, COSINE)
    tl.store(out_ptr + at[:, None] + (first + d)[None, :], o.to(DTYPE), mask=live[:, None])


def heads_attention_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    vectors: torch.Tensor,
    offset: torch.Tensor | None,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    pad_qkv: torch.Tensor | None,
    scale: float,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    eps: float | None,
    out: torch.Tensor | None = None,
    config: HeadsConfig | None = None,
    pdl: bool = False,
    norm_stats: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch on a contiguous ``x [B, H, W, C]``; ``vectors``, ``bias``, ``head_scale`` are packed.

    ``eps`` None means no LayerNorm (V2). ``norm_stats`` are those of x's rows, without ``offset``.
    """
    B, H, W, C = x.shape
    if out is None:
        out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    capability = device_capability(x.device)
    rows, cols = num_windows((H, W), window_size)
    if config is None:
        config = default_heads_config(C, capability)
    padded = (rows * window_size[0], cols * window_size[1]) != (H, W)
    if padded and pad_qkv is None:
        pad_qkv = torch.zeros(3 * C, dtype=x.dtype, device=x.device)
    tokens = window_size[0] * window_size[1]
    constants: dict[str, Any] = {
        "NH": num_heads, "D": C // num_heads, "N": tokens, "NP": row_tile(tokens),
        "WH": window_size[0], "WW": window_size[1], "SH": shift_size[0], "SW": shift_size[1],
        "HAS_PAD": padded, "HAS_OFFSET": offset is not None, "NORMALIZE": eps is not None,
        "COSINE": head_scale is not None, "NUM_STAGES": config.num_stages, "C": C,
        "BLOCK_K": config.block_k, "LINES": next_power_of_2(cdiv(C * C // num_heads, 64)),
    }  # fmt: skip
    programs = B * rows * cols * num_heads
    check_grid(programs)
    with on_device(x.device):
        on_grid(_heads_kernel, (programs,))(
            x, weight, vectors, vectors if offset is None else offset, bias,
            vectors if head_scale is None else head_scale, weight if pad_qkv is None else pad_qkv,
            out, scale * LOG2_E, 0.0 if eps is None else eps, H, W, rows, cols, **constants,
            stats_ptr=norm_stats, tokens=B * H * W,
            PARTS=0 if norm_stats is None else norm_stats.shape[1], num_warps=config.num_warps,
            **pdl_options(pdl, capability),
        )  # fmt: skip
    return out
