"""Backward of the feed-forward layer; its library form is one element-wise Triton kernel.

    dh, a [M, hidden]  ->  da = dh * gelu'(a)  (in dh's place)    h = gelu(a)    db1 = sum of da

    gelu'(a) = Phi(a) + a * phi(a),  Phi the normal distribution (by erf), phi its density

Stands between the products ``dy fc2`` and ``dpre fc1``. Memory bound: 2 tensors read, 2 written.
The bias sums stay element-wise in registers and are added up in a fixed order by a second kernel:
no atomics. The fused and epilogue forms: fused_backward.py, epilogue.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastswin._triton.launch import launch
from fastswin._triton.tiles import cdiv
from fastswin.ops.feed_forward.config import EpilogueConfig, FeedForwardConfig, FusedConfig
from fastswin.ops.feed_forward.epilogue import epilogue_bwd
from fastswin.ops.feed_forward.forward import config_of
from fastswin.ops.feed_forward.fused_backward import fused_bwd
from fastswin.ops.feed_forward.operands import aligned
from fastswin.ops.feed_forward.register import Tensors4
from fastswin.ops.hopper_gemm.config import HopperGemmConfig
from fastswin.ops.hopper_gemm.launch import hopper_epilogue_bwd
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
    launch(
        _gelu_bwd_kernel, row_programs * columns,
        dh, a, dh, a if h is None else h, partial, M,
        cdiv(cdiv(M, BLOCK_M), row_programs), row_programs, N=N,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, NEED_H=need_h, NEED_BIAS=need_bias, NUM_STAGES=3,
        num_warps=4,
    )  # fmt: skip
    if db is not None:
        sum_partials(partial, [db])
    return h, db


def weight_gradient(
    upstream: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype, direct: bool
) -> torch.Tensor:
    """``upstream' rows`` in ``dtype``: cast by the product itself (``direct``), or afterwards."""
    if direct and upstream.is_cuda and dtype == torch.float32 != upstream.dtype:
        return torch.mm(upstream.t(), rows, out_dtype=dtype)
    return (upstream.t() @ rows).to(dtype)


def feed_forward_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    pre: torch.Tensor | None,
    act: torch.Tensor | None,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor,
    needs: list[bool],
    weight_dtype: torch.dtype,
    config: FeedForwardConfig | None = None,
) -> Tensors4:
    """``(dx, dfc1_weight, dfc1_bias, dfc2_weight)``, empty where ``needs`` says no.

    Args:
        dy: ``[..., C_out]``, of any layout.
        x: ``[..., C]``.
        pre: ``[..., hidden]`` as the forward left it; None where it keeps nothing (fused form).
        act: ``[..., hidden]``, or None: made again.
        fc1_weight, fc2_weight: in x's dtype.
        fc1_bias: ``[hidden]``; read in the fused form only.
        needs: of x, fc1_weight, fc1_bias and fc2_weight.
        weight_dtype: of the weight gradients; the bias gradient is fp32.
        config: forms and tiles; None takes the heuristic's.
    """
    config = config or config_of(x, fc1_weight, fc2_weight)
    hidden, C = fc1_weight.shape
    need_x, need_w1, need_b1, need_w2 = needs
    dy_rows, x_rows = aligned(dy).view(-1, dy.shape[-1]), aligned(x).view(-1, C)
    fc1_weight, fc2_weight = aligned(fc1_weight), aligned(fc2_weight)
    kept = None if act is None else act.reshape(-1, hidden)
    dpre: torch.Tensor | None = None
    dx: torch.Tensor | None = None
    db1: torch.Tensor | None = None
    if pre is None:
        assert isinstance(config.backward, FusedConfig)
        kept, dpre, dx, db1 = fused_bwd(
            dy_rows, x_rows, fc1_weight, fc1_bias, fc2_weight, needs, config.backward
        )
    else:
        rows, need_act = aligned(pre).view(-1, hidden), need_w2 and kept is None
        if need_x or need_w1 or need_b1:
            if isinstance(config.backward, EpilogueConfig):
                made, dpre, db1 = epilogue_bwd(
                    dy_rows, rows, fc2_weight, need_act=need_act, need_bias=need_b1,
                    config=config.backward,
                )  # fmt: skip
            elif isinstance(config.backward, HopperGemmConfig):
                made, dpre, db1 = hopper_epilogue_bwd(
                    dy_rows, rows, fc2_weight, need_act=need_act, need_bias=need_b1,
                    config=config.backward,
                )  # fmt: skip
            else:
                dpre = dy_rows @ fc2_weight
                made, db1 = gelu_bwd(dpre, rows, need_h=need_act, need_bias=need_b1)
            kept = made if kept is None else kept
        elif need_act:
            kept = F.gelu(rows)
        if need_x:
            assert dpre is not None
            dx = dpre @ fc1_weight
    nothing = (0,)
    dw1, dw2 = (x.new_empty(nothing, dtype=weight_dtype) for _ in range(2))
    if need_w1:
        assert dpre is not None
        dw1 = weight_gradient(dpre, x_rows, weight_dtype, config.weights_in_fp32)
    if need_w2:
        assert kept is not None
        dw2 = weight_gradient(dy_rows, kept, weight_dtype, config.weights_in_fp32)
    return (
        x.new_empty(nothing) if dx is None else dx.view(x.shape),
        dw1,
        x.new_empty(nothing, dtype=torch.float32) if db1 is None else db1,
        dw2,
    )
