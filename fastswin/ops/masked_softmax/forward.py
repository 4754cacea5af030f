"""Forward kernels of ``y = softmax(scale * x + bias + mask)`` over the last axis.

    x, y    rows of N keys, any row stride; rows decomposed as in rows.py
    bias    broadcast by stride 0, added in fp32
    mask    bool/uint8 (non-zero hides the key exactly) or float (added in fp32)

Memory bound: x is read once and y written once; bias and mask tiles are read once per block of
rows and stay in registers while the program walks along the loop axis.

Rows that fit in registers are a tuple of CHUNKS tiles [R, L]. L is a few lanes wide for short
rows, so a warp holds many rows, neighbouring lanes read neighbouring keys, and a block of R rows
of 49 keys is one contiguous piece of memory. Longer rows go through two passes; the second one
walks backwards, so what it re-reads is what the cache saw last, and the first chunks never leave
the registers; stores are streamed past the cache for the same reason.

The score is kept in natural units and exponentiated as ``exp2((s - max) * log2 e)``: scaling
before the subtraction would lose the exactness of ``s - max`` at large scores. A row whose maximum
is -inf takes 0 instead, so it gives zeros and no NaN.
"""

# ruff: noqa: RUF005 - Triton has no starred tuples

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import on_device
from fastswin.ops.masked_softmax.config import SoftmaxConfig
from fastswin.ops.masked_softmax.device import (
    LOG2_E,
    MASK_ADD,
    MASK_HIDE,
    load_limit,
    loaded_elements,
    row_offset,
    score,
    visible_keys,
)
from fastswin.ops.masked_softmax.launch import Problem, forward_problem
from fastswin.ops.masked_softmax.paired import softmax_fwd_paired_kernel


@triton.jit
def _added_tile(
    bias_row, mask_row, col, keep, bias_key, mask_key,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """bias + mask of one tile in fp32; -inf where a bool mask hides."""
    added = tl.zeros([1, 1], tl.float32)
    if HAS_BIAS:
        at = bias_row[:, None] + col.to(tl.int64)[None, :] * bias_key
        added = tl.load(at, mask=keep, other=0.0).to(tl.float32)
    if MASK == MASK_ADD:
        at = mask_row[:, None] + col.to(tl.int64)[None, :] * mask_key
        added = added + tl.load(at, mask=keep, other=0.0).to(tl.float32)
    if MASK == MASK_HIDE:
        at = mask_row[:, None] + col.to(tl.int64)[None, :] * mask_key
        hidden = tl.load(at, mask=keep, other=0)
        added = tl.where(hidden != 0, -float("inf"), added)
    return added


@triton.jit
def _softmax_rows(
    x_row, out_row, bias_row, mask_row, row_ok, live, limit, N, scale, first, last,
    x_step, out_step, x_key, out_key, bias_key, mask_key,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr, PREFIX: tl.constexpr, EVEN: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, CHUNKS: tl.constexpr, LIVE: tl.constexpr,
):  # fmt: skip
    """R rows for every step of the loop; LIVE of CHUNKS tiles hold visible keys."""
    lane = tl.arange(0, L)
    added = ()
    for c in tl.static_range(LIVE):
        col = c * L + lane
        keep_added = loaded_elements(row_ok, limit, col, N, PREFIX, c == CHUNKS - 1 and not EVEN)
        tile = _added_tile(
            bias_row, mask_row, col, keep_added, bias_key, mask_key, HAS_BIAS, MASK
        )  # fmt: skip
        added = added + (tile,)
    one = tl.full([], 1, tl.int64)
    x_stride = one * x_step
    out_stride = one * out_step
    for step in range(first, last):
        x_at = x_row + step * x_stride
        out_at = out_row + step * out_stride
        raw = ()
        for c in tl.static_range(LIVE):
            col = c * L + lane
            keep_x = loaded_elements(row_ok, limit, col, N, PREFIX, c == CHUNKS - 1 and not EVEN)
            x = tl.load(x_at[:, None] + col[None, :] * x_key, mask=keep_x, other=0.0)
            raw = raw + (x,)
        peak = tl.full([R, L], -float("inf"), tl.float32)
        scores = ()
        for c in tl.static_range(LIVE):
            s = score(raw[c], added[c], scale, HAS_BIAS, MASK)
            col = c * L + lane
            if PREFIX:
                s = tl.where(col[None, :] < live[:, None], s, -float("inf"))
            elif c == CHUNKS - 1 and not EVEN:
                s = tl.where((col < N)[None, :], s, -float("inf"))
            peak = tl.maximum(peak, s)
            scores = scores + (s,)
        top = tl.max(peak, 1)
        top = tl.where(top == -float("inf"), 0.0, top)
        total = tl.zeros([R, L], tl.float32)
        probs = ()
        for c in tl.static_range(LIVE):
            p = tl.exp2((scores[c] - top[:, None]) * LOG2_E)
            total = total + p
            probs = probs + (p,)
        total = tl.sum(total, 1)
        inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
        for c in tl.static_range(CHUNKS):
            col = c * L + lane
            keep_y = loaded_elements(row_ok, limit, col, N, False, c == CHUNKS - 1 and not EVEN)
            if c < LIVE:
                y = (probs[c] * inverse[:, None]).to(out_row.dtype.element_ty)
            else:
                y = tl.zeros([R, L], out_row.dtype.element_ty)
            tl.store(out_at[:, None] + col[None, :] * out_key, y, mask=keep_y)


@triton.jit
def _softmax_fwd_kernel(
    x_ptr, out_ptr, bias_ptr, mask_ptr, lens_ptr, scale,
    rows, row_blocks, D1, D2, n_units, loop, steps,
    x_step, x0, x1, x2, out_step, out0, out1, out2,
    bias0, bias1, bias2, mask0, mask1, mask2, q0, q1, q2, n0, n1, n2,
    x_key, out_key, bias_key, mask_key,
    X_ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr,
    MASK_ALIGN: tl.constexpr, N_ALIGN: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, HAS_LENS: tl.constexpr,
    EVEN: tl.constexpr, R: tl.constexpr, L: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One program per (block of R rows, run of ``steps`` loop positions); whole rows at once."""
    pid = tl.program_id(0)
    first = pid // row_blocks * steps
    last = tl.minimum(first + steps, loop)
    row = pid % row_blocks * R + tl.arange(0, R)
    row_ok = row < rows
    N = n_units * N_ALIGN
    i2 = row % D2
    i1 = row // D2 % D1
    i0 = row // D2 // D1
    zero = tl.zeros([R], tl.int32)
    x_row = x_ptr + row_offset(zero, i0, i1, i2, x_step, x0, x1, x2, X_ALIGN)
    out_row = out_ptr + row_offset(zero, i0, i1, i2, out_step, out0, out1, out2, OUT_ALIGN)
    bias_row = bias_ptr + row_offset(zero, i0, i1, i2, 0, bias0, bias1, bias2, BIAS_ALIGN)
    mask_row = mask_ptr + row_offset(zero, i0, i1, i2, 0, mask0, mask1, mask2, MASK_ALIGN)
    x_step = x_step * X_ALIGN
    out_step = out_step * OUT_ALIGN
    PREFIX: tl.constexpr = CAUSAL or HAS_LENS
    if PREFIX:
        live = visible_keys(
            lens_ptr, i0, i1, i2, q0, q1, q2, n0, n1, n2, N, row_ok, CAUSAL, HAS_LENS
        )
        limit = load_limit(live, N_ALIGN)
        live_chunks = (tl.max(live, 0) + L - 1) // L
        for chunks in tl.static_range(CHUNKS + 1):
            if live_chunks == chunks:
                _softmax_rows(
                    x_row, out_row, bias_row, mask_row, row_ok, live, limit, N, scale, first, last,
                    x_step, out_step, x_key, out_key, bias_key, mask_key,
                    HAS_BIAS, MASK, PREFIX, EVEN, R, L, CHUNKS, chunks,
                )  # fmt: skip
    else:
        _softmax_rows(
            x_row, out_row, bias_row, mask_row, row_ok, row, row, N, scale, first, last,
            x_step, out_step, x_key, out_key, bias_key, mask_key,
            HAS_BIAS, MASK, PREFIX, EVEN, R, L, CHUNKS, CHUNKS,
        )  # fmt: skip


@triton.jit
def _long_score(
    x_row, bias_row, mask_row, col, live, limit, scale, x_key, bias_key, mask_key,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr, WHOLE: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """fp32 scores of one chunk ``col [P, V]`` of one row; -inf past the live prefix."""
    keep = col < limit
    if WHOLE:
        x = tl.load(x_row + col * x_key, eviction_policy=POLICY)
    else:
        x = tl.load(x_row + col * x_key, mask=keep, other=0.0, eviction_policy=POLICY)
    s = x.to(tl.float32) * scale
    wide = col.to(tl.int64)
    if HAS_BIAS:
        s = s + tl.load(bias_row + wide * bias_key, mask=keep, other=0.0).to(tl.float32)
    if MASK == MASK_ADD:
        s = s + tl.load(mask_row + wide * mask_key, mask=keep, other=0.0).to(tl.float32)
    if MASK == MASK_HIDE:
        hidden = tl.load(mask_row + wide * mask_key, mask=keep, other=0)
        s = tl.where(hidden != 0, -float("inf"), s)
    if not WHOLE:
        s = tl.where(col < live, s, -float("inf"))
    return s


@triton.jit
def _merge_chunk(peak, total, s):
    """Online update of each lane's running maximum and sum with a chunk ``s [P, V]``."""
    new_peak = tl.maximum(peak, tl.max(s, 1))
    shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    total = total * tl.exp2((peak - shift) * LOG2_E)
    total = total + tl.sum(tl.exp2((s - shift[:, None]) * LOG2_E), 1)
    return new_peak, total


@triton.jit
def _softmax_fwd_long_kernel(
    x_ptr, out_ptr, bias_ptr, mask_ptr, lens_ptr, scale,
    rows, row_blocks, D1, D2, n_units, loop, steps,
    x_step, x0, x1, x2, out_step, out0, out1, out2,
    bias0, bias1, bias2, mask0, mask1, mask2, q0, q1, q2, n0, n1, n2,
    x_key, out_key, bias_key, mask_key,
    X_ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr,
    MASK_ALIGN: tl.constexpr, N_ALIGN: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, HAS_LENS: tl.constexpr,
    P: tl.constexpr, V: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """One program per row, in chunks of P * V keys; the first KEPT chunks stay in registers."""
    row = tl.program_id(0)
    N = n_units * N_ALIGN
    i2 = row % D2
    i1 = row // D2 % D1
    i0 = row // D2 // D1
    x_row = x_ptr + row_offset(row * 0, i0, i1, i2, x_step, x0, x1, x2, X_ALIGN)
    out_row = out_ptr + row_offset(row * 0, i0, i1, i2, out_step, out0, out1, out2, OUT_ALIGN)
    bias_row = bias_ptr + row_offset(row * 0, i0, i1, i2, 0, bias0, bias1, bias2, BIAS_ALIGN)
    mask_row = mask_ptr + row_offset(row * 0, i0, i1, i2, 0, mask0, mask1, mask2, MASK_ALIGN)
    live = N
    PREFIX: tl.constexpr = CAUSAL or HAS_LENS
    if PREFIX:
        live = visible_keys(
            lens_ptr, i0, i1, i2, q0, q1, q2, n0, n1, n2, N, row < rows, CAUSAL, HAS_LENS
        )
    limit = load_limit(live, N_ALIGN)
    BLOCK: tl.constexpr = P * V
    lane = tl.arange(0, P)[:, None] * V + tl.arange(0, V)[None, :]
    whole = live // BLOCK
    peak = tl.full([P], -float("inf"), tl.float32)
    total = tl.zeros([P], tl.float32)
    kept = ()
    for c in tl.static_range(KEPT):
        s = _long_score(
            x_row, bias_row, mask_row, c * BLOCK + lane, live, limit, scale,
            x_key, bias_key, mask_key, HAS_BIAS, MASK, False, "evict_first",
        )  # fmt: skip
        peak, total = _merge_chunk(peak, total, s)
        kept = kept + (s,)
    for c in tl.range(KEPT, whole, num_stages=1):
        s = _long_score(
            x_row, bias_row, mask_row, c * BLOCK + lane, live, limit, scale,
            x_key, bias_key, mask_key, HAS_BIAS, MASK, True, "evict_last",
        )  # fmt: skip
        peak, total = _merge_chunk(peak, total, s)
    tail = tl.maximum(whole, KEPT)
    has_tail = tail * BLOCK < live
    if has_tail:
        s = _long_score(
            x_row, bias_row, mask_row, tail * BLOCK + lane, live, limit, scale, x_key, bias_key,
            mask_key, HAS_BIAS, MASK, False, "evict_last",
        )  # fmt: skip
        peak, total = _merge_chunk(peak, total, s)

    top = tl.max(peak, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(total * tl.exp2((peak - top) * LOG2_E), 0)
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)

    dtype = out_ptr.dtype.element_ty
    dead = tail + has_tail.to(tl.int32)
    for c in range(dead, (N + BLOCK - 1) // BLOCK):
        col = c * BLOCK + lane
        tl.store(
            out_row + col * out_key, tl.zeros([P, V], dtype), mask=col < N, cache_modifier=".cs"
        )
    if has_tail:
        col = tail * BLOCK + lane
        s = _long_score(
            x_row, bias_row, mask_row, col, live, limit, scale, x_key, bias_key, mask_key,
            HAS_BIAS, MASK, False, "evict_first",
        )  # fmt: skip
        y = tl.exp2((s - top) * LOG2_E) * inverse
        tl.store(out_row + col * out_key, y.to(dtype), mask=col < N, cache_modifier=".cs")
    for back in range(KEPT, whole):
        c = whole - 1 - (back - KEPT)
        col = c * BLOCK + lane
        s = _long_score(
            x_row, bias_row, mask_row, col, live, limit, scale, x_key, bias_key, mask_key,
            HAS_BIAS, MASK, True, "evict_first",
        )  # fmt: skip
        y = tl.exp2((s - top) * LOG2_E) * inverse
        tl.store(out_row + col * out_key, y.to(dtype), cache_modifier=".cs")
    for c in tl.static_range(KEPT):
        col = c * BLOCK + lane
        y = tl.exp2((kept[c] - top) * LOG2_E) * inverse
        tl.store(out_row + col * out_key, y.to(dtype), mask=col < N, cache_modifier=".cs")


FORWARD_KERNELS = {
    "whole": _softmax_fwd_kernel,
    "long": _softmax_fwd_long_kernel,
    "paired": softmax_fwd_paired_kernel,
}


def masked_softmax_fwd(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    scale: float,
    causal: bool,
    out: torch.Tensor | None = None,
    config: SoftmaxConfig | None = None,
) -> torch.Tensor:
    """Launch; ``out`` (which may be ``x`` itself) is written in full."""
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    problem = forward_problem(x, out, bias, mask, seq_lens, scale, causal, config)
    launch_forward(problem)
    return out


def launch_forward(problem: Problem) -> None:
    """Send one prepared problem to its GPU."""
    with on_device(problem.device):
        FORWARD_KERNELS[problem.form][(problem.programs,)](
            *problem.arguments, **problem.constants, num_warps=problem.num_warps
        )
