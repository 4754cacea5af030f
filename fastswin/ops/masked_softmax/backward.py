"""Backward kernels: ``ds = y * (g - sum(g * y))``, ``dx = scale * ds``, sums of ``ds``.

    y, g    rows of N keys; y is what the forward wrote, so hidden keys are exact zeros
    dx      same rows, contiguous
    partial [runs, rows, N] fp32: ds summed over one program's run of loop positions

Reads y and g once, writes dx once. The sums for dbias and the gradient of a float mask stay in
registers along the loop; each program writes its tile once and a second stage adds the tiles in a
fixed order (sums.py). No atomics: three runs give the same bits.
"""

# ruff: noqa: RUF005 - Triton has no starred tuples

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import on_device
from fastswin.ops.masked_softmax.config import SoftmaxConfig
from fastswin.ops.masked_softmax.device import (
    load_limit,
    loaded_elements,
    row_offset,
    visible_keys,
)
from fastswin.ops.masked_softmax.launch import backward_problem
from fastswin.ops.masked_softmax.paired import softmax_bwd_paired_kernel
from fastswin.ops.masked_softmax.sums import reduce_partial


@triton.jit
def _gradient_rows(
    y_row, g_row, dx_row, partial_row, row_ok, live, limit, N, scale, first, last,
    y_step, g_step, dx_step, y_key, g_key,
    NEEDS_DX: tl.constexpr, NEEDS_SUM: tl.constexpr, PREFIX: tl.constexpr, EVEN: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, CHUNKS: tl.constexpr, LIVE: tl.constexpr,
):  # fmt: skip
    """R rows for every step of the loop; LIVE of CHUNKS tiles hold visible keys."""
    lane = tl.arange(0, L)
    one = tl.full([], 1, tl.int64)
    y_stride = one * y_step
    g_stride = one * g_step
    dx_stride = one * dx_step
    sums = ()
    if NEEDS_SUM:
        for _c in tl.static_range(LIVE):
            sums = sums + (tl.zeros([R, L], tl.float32),)
    for step in range(first, last):
        y_at = y_row + step * y_stride
        g_at = g_row + step * g_stride
        dx_at = dx_row + step * dx_stride
        ys = ()
        gs = ()
        for c in tl.static_range(LIVE):
            col = c * L + lane
            keep_y = loaded_elements(row_ok, limit, col, N, PREFIX, c == CHUNKS - 1 and not EVEN)
            y = tl.load(y_at[:, None] + col[None, :] * y_key, mask=keep_y, other=0.0)
            g = tl.load(g_at[:, None] + col[None, :] * g_key, mask=keep_y, other=0.0)
            if PREFIX:
                seen = col[None, :] < live[:, None]
                y = tl.where(seen, y, 0.0)
                g = tl.where(seen, g, 0.0)
            ys = ys + (y,)
            gs = gs + (g,)
        products = tl.zeros([R, L], tl.float32)
        for c in tl.static_range(LIVE):
            products = products + ys[c].to(tl.float32) * gs[c].to(tl.float32)
        dot = tl.sum(products, 1)
        new_sums = ()
        for c in tl.static_range(CHUNKS):
            if c < LIVE:
                ds = ys[c].to(tl.float32) * (gs[c].to(tl.float32) - dot[:, None])
                if NEEDS_SUM:
                    new_sums = new_sums + (sums[c] + ds,)
            if NEEDS_DX:
                col = c * L + lane
                keep_dx = loaded_elements(
                    row_ok, limit, col, N, False, c == CHUNKS - 1 and not EVEN
                )
                if c < LIVE:
                    dx = (ds * scale).to(dx_row.dtype.element_ty)
                else:
                    dx = tl.zeros([R, L], dx_row.dtype.element_ty)
                tl.store(dx_at[:, None] + col[None, :], dx, mask=keep_dx)
        sums = new_sums
    if NEEDS_SUM:
        for c in tl.static_range(CHUNKS):
            col = c * L + lane
            keep = row_ok[:, None] & (col < N)[None, :]
            if c < LIVE:
                tl.store(partial_row[:, None] + col[None, :], sums[c], mask=keep)
            else:
                tl.store(
                    partial_row[:, None] + col[None, :], tl.zeros([R, L], tl.float32), mask=keep
                )


@triton.jit
def _softmax_bwd_kernel(
    y_ptr, g_ptr, dx_ptr, partial_ptr, lens_ptr, scale,
    rows, row_blocks, D1, D2, n_units, loop, steps,
    y_step, y0, y1, y2, g_step, g0, g1, g2, dx_step, dx0, dx1, dx2,
    q0, q1, q2, n0, n1, n2, y_key, g_key,
    Y_ALIGN: tl.constexpr, G_ALIGN: tl.constexpr, DX_ALIGN: tl.constexpr, N_ALIGN: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_LENS: tl.constexpr,
    NEEDS_DX: tl.constexpr, NEEDS_SUM: tl.constexpr,
    EVEN: tl.constexpr, R: tl.constexpr, L: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One program per (block of R rows, run of ``steps`` loop positions); whole rows at once."""
    pid = tl.program_id(0)
    run = pid // row_blocks
    first = run * steps
    last = tl.minimum(first + steps, loop)
    row = pid % row_blocks * R + tl.arange(0, R)
    row_ok = row < rows
    N = n_units * N_ALIGN
    i2 = row % D2
    i1 = row // D2 % D1
    i0 = row // D2 // D1
    zero = tl.zeros([R], tl.int32)
    y_row = y_ptr + row_offset(zero, i0, i1, i2, y_step, y0, y1, y2, Y_ALIGN)
    g_row = g_ptr + row_offset(zero, i0, i1, i2, g_step, g0, g1, g2, G_ALIGN)
    dx_row = dx_ptr + row_offset(zero, i0, i1, i2, dx_step, dx0, dx1, dx2, DX_ALIGN)
    partial_row = partial_ptr + (run.to(tl.int64) * rows + row) * n_units * N_ALIGN
    y_step = y_step * Y_ALIGN
    g_step = g_step * G_ALIGN
    dx_step = dx_step * DX_ALIGN
    PREFIX: tl.constexpr = CAUSAL or HAS_LENS
    if PREFIX:
        live = visible_keys(
            lens_ptr, i0, i1, i2, q0, q1, q2, n0, n1, n2, N, row_ok, CAUSAL, HAS_LENS
        )
        limit = load_limit(live, N_ALIGN)
        live_chunks = (tl.max(live, 0) + L - 1) // L
        for chunks in tl.static_range(CHUNKS + 1):
            if live_chunks == chunks:
                _gradient_rows(
                    y_row, g_row, dx_row, partial_row, row_ok, live, limit, N, scale, first, last,
                    y_step, g_step, dx_step, y_key, g_key,
                    NEEDS_DX, NEEDS_SUM, PREFIX, EVEN, R, L, CHUNKS, chunks,
                )  # fmt: skip
    else:
        _gradient_rows(
            y_row, g_row, dx_row, partial_row, row_ok, row, row, N, scale, first, last,
            y_step, g_step, dx_step, y_key, g_key,
            NEEDS_DX, NEEDS_SUM, PREFIX, EVEN, R, L, CHUNKS, CHUNKS,
        )  # fmt: skip


@triton.jit
def _long_pair(
    y_row, g_row, col, live, limit, y_key, g_key, PREFIX: tl.constexpr, POLICY: tl.constexpr
):
    """y and g of one chunk ``col [P, V]`` of one row; zeros past the live prefix."""
    keep = col < limit
    y = tl.load(y_row + col * y_key, mask=keep, other=0.0, eviction_policy=POLICY)
    g = tl.load(g_row + col * g_key, mask=keep, other=0.0, eviction_policy=POLICY)
    if PREFIX:
        y = tl.where(col < live, y, 0.0)
        g = tl.where(col < live, g, 0.0)
    return y, g


@triton.jit
def _packed(x, zero):
    """``x``, as something that the compiler cannot recognise; ``zero`` is 0 when it runs.

    Otherwise it keeps the fp32 form that the first pass has made, in twice the registers: four
    kept chunks of both tensors took 128 instead of 64 and were spilled.
    """
    if x.dtype.primitive_bitwidth == 16:
        x = (x.to(tl.int16, bitcast=True) ^ zero).to(x.dtype, bitcast=True)
    return x


@triton.jit
def _softmax_bwd_long_kernel(
    y_ptr, g_ptr, dx_ptr, partial_ptr, lens_ptr, scale,
    rows, row_blocks, D1, D2, n_units, loop, steps,
    y_step, y0, y1, y2, g_step, g0, g1, g2, dx_step, dx0, dx1, dx2,
    q0, q1, q2, n0, n1, n2, y_key, g_key,
    Y_ALIGN: tl.constexpr, G_ALIGN: tl.constexpr, DX_ALIGN: tl.constexpr, N_ALIGN: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_LENS: tl.constexpr,
    NEEDS_DX: tl.constexpr, NEEDS_SUM: tl.constexpr,
    P: tl.constexpr, V: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """One row per program, in chunks of P * V keys.

    Every chunk but the first KEPT, which stay in registers, is read twice, the second time from
    the L2 cache as long as the rows under way fit there together: what is read for the last time
    and what is written says that it may go first.
    """
    BLOCK: tl.constexpr = P * V
    PREFIX: tl.constexpr = CAUSAL or HAS_LENS
    dtype = dx_ptr.dtype.element_ty
    N = n_units * N_ALIGN
    lane = tl.arange(0, P)[:, None] * V + tl.arange(0, V)[None, :]
    zero = tl.where(scale != scale, 1, 0).to(tl.int16)  # scale is finite
    row = tl.program_id(0)
    i2 = row % D2
    i1 = row // D2 % D1
    i0 = row // D2 // D1
    y_row = y_ptr + row_offset(row * 0, i0, i1, i2, y_step, y0, y1, y2, Y_ALIGN)
    g_row = g_ptr + row_offset(row * 0, i0, i1, i2, g_step, g0, g1, g2, G_ALIGN)
    dx_row = dx_ptr + row_offset(row * 0, i0, i1, i2, dx_step, dx0, dx1, dx2, DX_ALIGN)
    partial_row = partial_ptr + row.to(tl.int64) * n_units * N_ALIGN
    live = N
    if PREFIX:
        live = visible_keys(
            lens_ptr, i0, i1, i2, q0, q1, q2, n0, n1, n2, N, row < rows, CAUSAL, HAS_LENS
        )
    limit = load_limit(live, N_ALIGN)
    chunks = (live + BLOCK - 1) // BLOCK
    dots = tl.zeros([P], tl.float32)
    kept_y = ()
    kept_g = ()
    for c in tl.static_range(KEPT):
        y, g = _long_pair(
            y_row, g_row, c * BLOCK + lane, live, limit, y_key, g_key, PREFIX, "evict_first"
        )
        dots += tl.sum(y.to(tl.float32) * g.to(tl.float32), 1)
        if V > 1:
            y = _packed(y, zero)
            g = _packed(g, zero)
        kept_y = kept_y + (y,)
        kept_g = kept_g + (g,)
    for c in tl.range(KEPT, chunks, num_stages=1):
        col = c * BLOCK + lane
        y_chunk, g_chunk = _long_pair(
            y_row, g_row, col, live, limit, y_key, g_key, PREFIX, "evict_last"
        )
        dots += tl.sum(y_chunk.to(tl.float32) * g_chunk.to(tl.float32), 1)
    dot = tl.sum(dots, 0)
    if PREFIX:
        for c in range(tl.maximum(chunks, KEPT), (N + BLOCK - 1) // BLOCK):
            col = c * BLOCK + lane
            if NEEDS_DX:
                tl.store(dx_row + col, tl.zeros([P, V], dtype), mask=col < N)
            if NEEDS_SUM:
                tl.store(partial_row + col, tl.zeros([P, V], tl.float32), mask=col < N)
    for back in range(KEPT, chunks):
        col = (chunks - 1 + KEPT - back) * BLOCK + lane
        y_back, g_back = _long_pair(
            y_row, g_row, col, live, limit, y_key, g_key, PREFIX, "evict_first"
        )
        ds = y_back.to(tl.float32) * (g_back.to(tl.float32) - dot)
        if NEEDS_DX:
            tl.store(dx_row + col, (ds * scale).to(dtype), mask=col < N, cache_modifier=".cs")
        if NEEDS_SUM:
            tl.store(partial_row + col, ds, mask=col < N)
    for c in tl.static_range(KEPT):
        col = c * BLOCK + lane
        ds = kept_y[c].to(tl.float32) * (kept_g[c].to(tl.float32) - dot)
        if NEEDS_DX:
            tl.store(dx_row + col, (ds * scale).to(dtype), mask=col < N, cache_modifier=".cs")
        if NEEDS_SUM:
            tl.store(partial_row + col, ds, mask=col < N)


BACKWARD_KERNELS = {
    "whole": _softmax_bwd_kernel,
    "long": _softmax_bwd_long_kernel,
    "paired": softmax_bwd_paired_kernel,
}


def masked_softmax_bwd(
    grad: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    scale: float,
    causal: bool,
    needs: tuple[bool, bool, bool],
    config: SoftmaxConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch; gradients of x, bias and float mask, an empty tensor where not needed."""
    summed = {
        name: like
        for name, like, needed in (("bias", bias, needs[1]), ("mask", mask, needs[2]))
        if needed and like is not None
    }
    if needs[0]:
        dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    else:
        dx = y.new_empty(0)

    def result(name: str, found: dict[str, torch.Tensor]) -> torch.Tensor:
        return found[name] if name in found else y.new_empty(0)

    if y.numel() == 0:
        zeros = {name: torch.zeros_like(like) for name, like in summed.items()}
        return dx, result("bias", zeros), result("mask", zeros)
    if not needs[0] and not summed:
        return dx, y.new_empty(0), y.new_empty(0)
    problem = backward_problem(
        grad, y, dx if needs[0] else None, summed, seq_lens, scale, causal, config
    )
    with on_device(problem.device):
        BACKWARD_KERNELS[problem.form][(problem.programs,)](
            *problem.arguments, **problem.constants, num_warps=problem.num_warps
        )
    results = {
        name: reduce_partial(problem.partial, problem.plan, name, like)
        for name, like in summed.items()
    }
    return dx, result("bias", results), result("mask", results)
