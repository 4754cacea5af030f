"""GEMM for few rows: what counts is latency, not throughput.

    x [M, K]   weight [N, K]   bias [N] fp32   residual, out [M, N]
    GATHER: x [B, H, W, K / 4], M = B * ceil(H / 2) * ceil(W / 2) rows of 2x2 neighbours

With 49 to 3,136 rows a block's product takes under a microsecond of arithmetic; its time is the
launch, the way of x from L2 and a chain of dependent steps. There is no loop over K: a program asks
for its strip of weights ``[BLOCK_N, K]`` before it waits for the kernel in front (_triton/pdl.py)
and holds it in registers when the wait ends; then x arrives at once, is normalised and multiplied.

LayerNorm may stand behind the product; its statistics then come from the product that wrote x,
where each program leaves mean and squared deviations of its columns of a row (stats.py). Rows reach
the tensor cores as they lie in memory:

    norm(x) @ W.T = rstd * (x @ W.T - mean * W.sum(1))

Sums of x's own rows and of the weights' in this kernel cost 2 us, more than a LayerNorm (1.2).

To gather, tiles have an axis of four neighbours in front, ``[4, BLOCK, K / 4]``, which are
multiplied as one batched product and summed in a fixed order. Cutting K like that elsewhere made
launches two to ten times slower (docs/performance.md).

2 M N K FLOPs; every program reads its whole strip, so L2 delivers
``M N K (1 / BLOCK_M + 1 / BLOCK_N) * itemsize`` bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, multiprocessor_count, on_device
from fastswin._triton.launch import on_grid
from fastswin._triton.math import gelu
from fastswin._triton.pdl import pdl_options, wait_for_previous
from fastswin._triton.row_statistics import joined_stats
from fastswin._triton.tiles import cdiv, split_columns
from fastswin.ops.linear.config import OneShotConfig, default_one_shot_config
from fastswin.ops.linear.operands import prepare_operands


@triton.jit
def _channels(FIRST: tl.constexpr, EACH: tl.constexpr, C: tl.constexpr, GATHER: tl.constexpr):
    """Channel numbers ``[1, EACH]``; to gather ``[4, 1, EACH]``, C between neighbours."""
    if GATHER:
        first = FIRST + tl.arange(0, 4)[:, None, None] * C
        return first + tl.arange(0, EACH)[None, None, :]
    else:
        return FIRST + tl.arange(0, EACH)[None, :]


@triton.jit
def _down(row, GATHER: tl.constexpr):
    """A vector over rows, broadcastable to a tile of activations or weights."""
    if GATHER:
        return row[None, :, None]
    else:
        return row[:, None]


@triton.jit
def _row_sums(v, GATHER: tl.constexpr):
    """Sums over the channels of a tile, ``[BLOCK_M]``."""
    if GATHER:
        return tl.sum(tl.sum(v, 2), 0)
    else:
        return tl.sum(v, 1)


@triton.jit
def _load_rows(
    x_ptr, offset_ptr, row, valid, k, H, W, FIRST: tl.constexpr, EACH: tl.constexpr,
    K: tl.constexpr, GATHER: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """Channels ``k`` of the activations' rows, offset added; in their dtype without one.

    Neighbours in the order (row, column) even-even, odd-even, even-odd, odd-odd.
    """
    if GATHER:
        C: tl.constexpr = K // 4
        out_w = (W + 1) // 2
        tokens = (H + 1) // 2 * out_w
        side = tl.arange(0, 4)[:, None, None]
        y = (row % tokens // out_w * 2)[None, :, None] + side % 2
        x = (row % tokens % out_w * 2)[None, :, None] + side // 2
        inside = valid[None, :, None] & (y < H) & (x < W)
        token = (row // tokens).to(tl.int64)[None, :, None] * H * W + y * W + x
        c = FIRST + tl.arange(0, EACH)
        v = tl.load(x_ptr + token * C + c[None, None, :], mask=inside, other=0.0)
        if HAS_OFFSET:
            v = v.to(tl.float32) + tl.load(offset_ptr + c).to(tl.float32)[None, None, :]
            v = tl.where(inside, v, 0.0)
    else:
        at = row.to(tl.int64)[:, None] * K + k
        v = tl.load(x_ptr + at, mask=valid[:, None], other=0.0)
        if HAS_OFFSET:
            v = v.to(tl.float32) + tl.load(offset_ptr + k).to(tl.float32)
    return v


@triton.jit
def _multiply(x, w, acc, GATHER: tl.constexpr):
    """``acc + x @ w.T``, each neighbour by itself."""
    if GATHER:
        return tl.dot(x, tl.permute(w, (0, 2, 1)), acc)
    else:
        return tl.dot(x, tl.trans(w), acc)


@triton.jit(do_not_specialize=["M"])
def _one_shot_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, offset_ptr, residual_ptr, out_ptr, M, H, W, eps,
    N: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NORMALIZE: tl.constexpr, GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_OFFSET: tl.constexpr, GELU: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr, stats_ptr=None, weight_sums_ptr=None,
    stats_out_ptr=None, TILES: tl.constexpr = 0,
):  # fmt: skip
    """One program per output tile; columns fastest. With TILES LayerNorm stands behind."""
    K: tl.constexpr = KA + KB
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    row = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = row < M
    # channels of two powers of two; to gather those of each neighbour
    EACH_A: tl.constexpr = KA // 4 if GATHER else KA
    EACH_B: tl.constexpr = 16 if KB == 0 else KB // 4 if GATHER else KB
    ka = _channels(0, EACH_A, K // 4, GATHER)
    kb = _channels(EACH_A, EACH_B, K // 4, GATHER)
    cols_valid = _down(col < N, GATHER)
    weight_at = weight_ptr + _down(col * K, GATHER)
    wa = tl.load(weight_at + ka, mask=cols_valid, other=0.0)
    if KB > 0:
        wb = tl.load(weight_at + kb, mask=cols_valid, other=0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)
    if TILES > 0:
        weight_sum = tl.load(weight_sums_ptr + col, mask=col < N, other=0.0)
    wait_for_previous(PDL)
    a = _load_rows(x_ptr, offset_ptr, row, valid, ka, H, W, 0, EACH_A, K, GATHER, HAS_OFFSET)
    if KB > 0:
        b = _load_rows(
            x_ptr, offset_ptr, row, valid, kb, H, W, EACH_A, EACH_B, K, GATHER, HAS_OFFSET
        )
    if TILES > 0:
        mean, rstd = joined_stats(stats_ptr, row, valid, M, eps, K, TILES)
    at = row[:, None].to(tl.int64) * N + col[None, :]
    keep = valid[:, None] & (col < N)[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=keep, other=0.0).to(tl.float32)
    if NORMALIZE:
        a = a.to(tl.float32)
        total = _row_sums(a, GATHER)
        if KB > 0:
            b = b.to(tl.float32)
            total += _row_sums(b, GATHER)
        a -= _down(total / K, GATHER)
        square = _row_sums(a * a, GATHER)
        if KB > 0:
            b -= _down(total / K, GATHER)
            square += _row_sums(b * b, GATHER)
        rstd = 1.0 / tl.sqrt(square / K + eps)
        a *= _down(rstd, GATHER)
        if KB > 0:
            b *= _down(rstd, GATHER)
    if GATHER:
        acc = tl.zeros([4, BLOCK_M, BLOCK_N], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = _multiply(a.to(dtype), wa, acc, GATHER)
    if KB > 0:
        acc = _multiply(b.to(dtype), wb, acc, GATHER)
    y = tl.sum(acc, 0) if GATHER else acc
    if TILES > 0:
        y = (y - mean[:, None] * weight_sum[None, :]) * rstd[:, None]
    if HAS_BIAS:
        y += bias[None, :]
    if GELU:
        y = gelu(y)
    if HAS_RESIDUAL:
        y += residual
    stored = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, stored, mask=keep)
    if stats_out_ptr is not None:  # N is a multiple of BLOCK_N there
        y = stored.to(tl.float32)
        part_mean = tl.sum(y, 1) / BLOCK_N
        y -= part_mean[:, None]
        to = stats_out_ptr + tl.program_id(0) % tiles_n * M + row
        tl.store(to, part_mean, mask=valid)
        tl.store(to + tiles_n * M, tl.sum(y * y, 1), mask=valid)


def one_shot_linear_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    eps: float | None,
    offset: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    config: OneShotConfig | None = None,
    pdl: bool = False,
    gather: bool = False,
    norm_stats: torch.Tensor | None = None,
    weight_sums: torch.Tensor | None = None,
    stats_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the one-shot GEMM on ``x [..., K]``, or ``[B, H, W, K / 4]`` to gather.

    ``eps`` None means no LayerNorm; otherwise as the public functions have it.
    """
    H, W = (x.shape[1], x.shape[2]) if gather else (1, 1)
    rows = (x.shape[0], cdiv(H, 2), cdiv(W, 2)) if gather else None
    given = prepare_operands(x, weight, bias, offset, residual, out, rows)
    out, M, N, K = given.out, given.M, given.N, given.K
    if out.numel() == 0:
        return out
    if config is None:
        config = default_one_shot_config(M, N, K, multiprocessor_count(x.device), gather)
    columns = split_columns(K)  # of 4C: four times those of C
    assert columns is not None  # one_shot_blocker was asked before
    programs = cdiv(M, config.block_m) * cdiv(N, config.block_n)
    with on_device(x.device):
        on_grid(_one_shot_linear_kernel, (programs,))(
            *given.pointers("x", "weight", "bias", "offset", "residual", "out"), M, H, W,
            0.0 if eps is None else eps,
            N=N, KA=columns[0], KB=columns[1], BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            NORMALIZE=eps is not None and norm_stats is None, GATHER=gather,
            HAS_BIAS=bias is not None, HAS_OFFSET=offset is not None, GELU=activation == "gelu",
            HAS_RESIDUAL=residual is not None, stats_ptr=norm_stats, weight_sums_ptr=weight_sums,
            stats_out_ptr=stats_out, TILES=0 if norm_stats is None else norm_stats.shape[1],
            num_warps=config.num_warps, **pdl_options(pdl, device_capability(x.device)),
        )  # fmt: skip
    return out
