"""Backward of the feed-forward layer: cuBLAS products around one element-wise Triton kernel.

    dh, a [M, hidden]  ->  da = dh * gelu'(a)  (in dh's place)    h = gelu(a)    db1 = sum of da

    gelu'(a) = Phi(a) + a * phi(a),  Phi the normal distribution (by erf), phi its density

Memory bound: 2 tensors read, 2 written. The bias sums stay element-wise in registers and are added
up in a fixed order by a second kernel: no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import on_device
from fastswin._triton.tiles import cdiv
from fastswin.ops.feed_forward.register import Tensors4
from fastswin.ops.residual_norm.backward import sum_partials

BLOCK_M, BLOCK_N = 16, 128

#: Programs over the whole map, a fixed number so that sums have one order on every card; 8 for
#: each of an H100's 132 multiprocessors.
PROGRAMS = 1056


@triton.jit(do_not_specialize=["M", "tiles", "row_programs"])
def _gelu_bwd_kernel(
    dh_ptr, a_ptr, da_ptr, h_ptr, partial_ptr, M, tiles, row_programs,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NEED_H: tl.constexpr,
    NEED_BIAS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program per column tile and every ``row_programs``-th row tile."""
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    p = tl.program_id(0) // columns
    column = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in tl.range(0, tiles, num_stages=NUM_STAGES):
        row = (p + tile * row_programs).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        keep = (row < M)[:, None] & (column < N)[None, :]
        at = row[:, None] * N + column[None, :]
        a = tl.load(a_ptr + at, mask=keep, other=0.0).to(tl.float32)
        dh = tl.load(dh_ptr + at, mask=keep, other=0.0).to(tl.float32)
        cdf = 0.5 * (1.0 + tl.erf(a * 0.7071067811865476))
        # exp of -a**2 / 2 underflows to 0 long before a * 0 could be a NaN: clamp infinite a
        inside = tl.minimum(tl.maximum(a, -40.0), 40.0)
        density = 0.3989422804014327 * tl.exp(-0.5 * inside * inside)
        da = dh * (cdf + inside * density)
        tl.store(da_ptr + at, da.to(da_ptr.dtype.element_ty), mask=keep)
        if NEED_H:
            tl.store(h_ptr + at, (a * cdf).to(h_ptr.dtype.element_ty), mask=keep)
        if NEED_BIAS:
            total += da
    if NEED_BIAS:
        at = partial_ptr + p.to(tl.int64) * N + column
        tl.store(at, tl.sum(total, 0), mask=column < N)


def gelu_bwd(
    dh: torch.Tensor, a: torch.Tensor, *, need_h: bool, need_bias: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``dh [M, N]`` becomes ``da`` in place; ``(gelu(a), column sums of da in fp32)`` if needed."""
    M, N = dh.shape
    h = torch.empty_like(a) if need_h else None
    db = torch.empty(N, dtype=torch.float32, device=a.device) if need_bias else None
    if M == 0:
        return h, None if db is None else db.zero_()
    columns = cdiv(N, BLOCK_N)
    row_programs = min(cdiv(M, BLOCK_M), max(1, PROGRAMS // columns))
    partial = torch.empty(
        (row_programs, 1, N) if need_bias else 0, dtype=torch.float32, device=a.device
    )
    with on_device(a.device):
        _gelu_bwd_kernel[(row_programs * columns,)](
            dh, a, dh, a if h is None else h, partial, M,
            cdiv(cdiv(M, BLOCK_M), row_programs), row_programs, N=N,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, NEED_H=need_h, NEED_BIAS=need_bias, NUM_STAGES=3,
            num_warps=4,
        )  # fmt: skip
    if db is not None:
        sum_partials(partial, [db])
    return h, db


def feed_forward_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    h: torch.Tensor | None,
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    needs: list[bool],
) -> Tensors4:
    """``(dx, dfc1_weight, dfc1_bias, dfc2_weight)``, empty where ``needs`` says no."""
    need_x, need_w1, need_b1, need_w2 = needs
    hidden, C = fc1_weight.shape
    dy_rows = dy.reshape(-1, dy.shape[-1]).contiguous()
    a_rows, x_rows = a.reshape(-1, hidden).contiguous(), x.reshape(-1, C)
    nothing = x.new_empty(0)
    dx, dw1, db1, dw2 = nothing, nothing.clone(), nothing.clone(), nothing.clone()
    kept = None if h is None else h.reshape(-1, hidden)
    if need_x or need_w1 or need_b1:
        da = dy_rows @ fc2_weight
        made, bias_sums = gelu_bwd(da, a_rows, need_h=need_w2 and kept is None, need_bias=need_b1)
        kept = made if made is not None else kept
        if need_x:
            dx = (da @ fc1_weight).view(x.shape)
        if need_w1:
            dw1 = da.t() @ x_rows
        if bias_sums is not None:
            db1 = bias_sums.to(x.dtype)
    if need_w2:
        rows = torch.nn.functional.gelu(a_rows) if kept is None else kept
        dw2 = dy_rows.t() @ rows
    return dx, dw1, db1, dw2
