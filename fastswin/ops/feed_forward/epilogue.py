"""Products of the feed-forward layer with GELU, or its derivative, at their only store.

    forward     pre = x fc1' + b1                     act = gelu(pre)
    backward    dpre = (dy fc2) * gelu'(pre)          act = gelu(pre) again, db1 = sum of dpre

    x [M, C]   fc1 [hidden, C]   dy [M, C_out]   fc2 [C_out, hidden]   pre, act, dpre [M, hidden]

GELU is taken of pre as rounded for memory, in both directions: act has the same bits in both. Bias
sums are taken once per output tile and added up by a second kernel in a fixed order: no atomics.
Operands come through the tensor copy engine.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import multiprocessor_count
from fastswin._triton.launch import launch
from fastswin._triton.math import gelu, gelu_and_slope
from fastswin._triton.tiles import cdiv
from fastswin.ops.feed_forward.bias_sums import bias_partials, sum_bias_partials
from fastswin.ops.feed_forward.config import EpilogueConfig
from fastswin.ops.feed_forward.operands import describe


@triton.jit
def _store(value, ptr, desc, tile_m, tile_n, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
           TMA: tl.constexpr):  # fmt: skip
    if TMA:
        desc.store([tile_m * BLOCK_M, tile_n * BLOCK_N], value)
    else:
        row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        keep = (row < M)[:, None] & (col < N)[None, :]
        tl.store(ptr + row[:, None] * N + col[None, :], value, mask=keep)


@triton.jit
def _finish(
    acc, bias_ptr, pre_ptr, pre_desc, act_ptr, act_desc, dpre_ptr, dpre_desc, partial_ptr,
    tile_m, tile_n, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BACKWARD: tl.constexpr,
    HAS_BIAS: tl.constexpr, NEED_ACT: tl.constexpr, NEED_B1: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Everything behind the product of one tile."""
    dtype: tl.constexpr = act_ptr.dtype.element_ty
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if BACKWARD:
        row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        keep = (row < M)[:, None] & (col < N)[None, :]
        if TMA:
            pre = pre_desc.load([tile_m * BLOCK_M, tile_n * BLOCK_N])
        else:
            pre = tl.load(pre_ptr + row[:, None] * N + col[None, :], mask=keep, other=0.0)
        act, slope = gelu_and_slope(pre.to(tl.float32))
        dpre = acc * slope
        _store(dpre.to(dtype), dpre_ptr, dpre_desc, tile_m, tile_n, M, N, BLOCK_M, BLOCK_N, TMA)
        if NEED_ACT:
            _store(act.to(dtype), act_ptr, act_desc, tile_m, tile_n, M, N, BLOCK_M, BLOCK_N, TMA)
        if NEED_B1:
            out = partial_ptr + tile_m.to(tl.int64) * N + col
            tl.store(out, tl.sum(dpre, 0), mask=col < N)
    else:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        pre = acc.to(dtype)
        _store(pre, pre_ptr, pre_desc, tile_m, tile_n, M, N, BLOCK_M, BLOCK_N, TMA)
        act = gelu(pre.to(tl.float32)).to(dtype)
        _store(act, act_ptr, act_desc, tile_m, tile_n, M, N, BLOCK_M, BLOCK_N, TMA)


@triton.jit(do_not_specialize=["M"])
def _epilogue_kernel(
    rows_ptr, rows_desc, weight_desc, bias_ptr, pre_ptr, pre_desc, act_ptr, act_desc, dpre_ptr,
    dpre_desc, partial_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BACKWARD: tl.constexpr,
    HAS_BIAS: tl.constexpr, NEED_ACT: tl.constexpr, NEED_B1: tl.constexpr, TMA: tl.constexpr,
    NUM_STAGES: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Columns fastest, so that neighbours share rows; weight is fc1 [N, K], or fc2 [K, N]."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    if PERSISTENT:
        for tile in tl.range(
            tl.program_id(0), tl.cdiv(M, BLOCK_M) * tiles_n, tl.num_programs(0), flatten=True
        ):
            tile_m = tile // tiles_n
            tile_n = tile % tiles_n
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
                x = rows_desc.load([tile_m * BLOCK_M, start])
                if BACKWARD:
                    acc = tl.dot(x, weight_desc.load([start, tile_n * BLOCK_N]), acc)
                else:
                    acc = tl.dot(x, weight_desc.load([tile_n * BLOCK_N, start]).T, acc)
            _finish(
                acc, bias_ptr, pre_ptr, pre_desc, act_ptr, act_desc, dpre_ptr, dpre_desc,
                partial_ptr, tile_m, tile_n, M, N, BLOCK_M, BLOCK_N, BACKWARD, HAS_BIAS, NEED_ACT,
                NEED_B1, TMA,
            )  # fmt: skip
    else:
        tile_m = tl.program_id(0) // tiles_n
        tile_n = tl.program_id(0) % tiles_n
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            x = rows_desc.load([tile_m * BLOCK_M, start])
            if BACKWARD:
                acc = tl.dot(x, weight_desc.load([start, tile_n * BLOCK_N]), acc)
            else:
                acc = tl.dot(x, weight_desc.load([tile_n * BLOCK_N, start]).T, acc)
        _finish(
            acc, bias_ptr, pre_ptr, pre_desc, act_ptr, act_desc, dpre_ptr, dpre_desc, partial_ptr,
            tile_m, tile_n, M, N, BLOCK_M, BLOCK_N, BACKWARD, HAS_BIAS, NEED_ACT, NEED_B1, TMA,
        )  # fmt: skip


def _run(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pre: torch.Tensor,
    act: torch.Tensor | None,
    dpre: torch.Tensor | None,
    partial: torch.Tensor | None,
    config: EpilogueConfig,
) -> None:
    """Launch; ``dpre`` tells the direction."""
    (M, K), N, backward = rows.shape, pre.shape[1], dpre is not None
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k

    def hidden(t: torch.Tensor | None) -> tuple:
        if t is None:
            return rows, rows
        return t, describe(t, block_m, block_n) if config.tma_hidden else t

    tiles = cdiv(M, block_m) * cdiv(N, block_n)
    programs = config.persistent * multiprocessor_count(rows.device) or tiles
    weight_tile = (block_k, block_n) if backward else (block_n, block_k)
    launch(
        _epilogue_kernel, min(tiles, programs),
        rows, describe(rows, block_m, block_k), describe(weight, *weight_tile),
        rows if bias is None else bias, *hidden(pre), *hidden(act), *hidden(dpre),
        rows if partial is None else partial, M, N, K,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, BACKWARD=backward,
        HAS_BIAS=bias is not None, NEED_ACT=act is not None, NEED_B1=partial is not None,
        TMA=config.tma_hidden, NUM_STAGES=config.num_stages, PERSISTENT=config.persistent > 0,
        num_warps=config.num_warps, **config.register_limit,
    )  # fmt: skip


def epilogue_fwd(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    config: EpilogueConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(pre, act)``, each ``[M, hidden]``, of contiguous, aligned ``x [M, C]`` and weights."""
    pre = x.new_empty(x.shape[0], fc1_weight.shape[0])
    act = torch.empty_like(pre)
    if pre.numel():
        _run(x, fc1_weight, fc1_bias, pre, act, None, None, config)
    return pre, act


def epilogue_bwd(
    dy: torch.Tensor,
    pre: torch.Tensor,
    fc2_weight: torch.Tensor,
    *,
    need_act: bool,
    need_bias: bool,
    config: EpilogueConfig,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """``(act or None, dpre, db1 in fp32 or None)`` of ``dy [M, C_out]`` and ``pre [M, hidden]``."""
    M, hidden = pre.shape
    dpre = torch.empty_like(pre)
    act = torch.empty_like(pre) if need_act else None
    db1 = pre.new_empty(hidden, dtype=torch.float32) if need_bias else None
    if M == 0:
        return act, dpre, None if db1 is None else db1.zero_()
    partial = bias_partials(cdiv(M, config.block_m), hidden, pre) if need_bias else None
    _run(dy, fc2_weight, None, pre, act, dpre, partial, config)
    if db1 is not None and partial is not None:
        sum_bias_partials(partial, db1)
    return act, dpre, db1
