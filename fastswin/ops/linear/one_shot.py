"""GEMMs for few rows: what counts is latency, not throughput.

    x [M, K]   weight [N, K]   bias [N] fp32   residual, out [M, N]
    GATHER: x [B, H, W, K / 4], M = B * ceil(H / 2) * ceil(W / 2) rows of 2x2 neighbours

With 49 to 3,136 rows a block's product takes under a microsecond of arithmetic; its time is the
launch, the way of x from L2 and a chain of dependent steps. Two forms, both of which ask for the
weights before they wait for the kernel in front (_triton/pdl.py):

- ``one-shot`` has no loop over K: a program holds its strip of weights ``[BLOCK_N, K]`` in
  registers when the wait ends, then x arrives in one go, is normalised and multiplied.
- ``sliced`` serves K too long for that (fc2): K is walked over in steps.

Both cut a tile along K into SLICES that different warps multiply side by side, as one batched
product, and sum at the end in a fixed order: a chain of K / 16 tensor-core steps, 33 cycles each,
becomes one of K / (16 * SLICES), and no warp needs all of x.

2 M N K FLOPs; every program reads its whole strip, so L2 delivers
``M N K (1 / BLOCK_M + 1 / BLOCK_N) * itemsize`` bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, multiprocessor_count, on_device
from fastswin._triton.math import gelu
from fastswin._triton.pdl import launch_dependents, pdl_options, prefetch_l2, wait_for_previous
from fastswin._triton.tiles import cdiv, next_power_of_2, split_columns
from fastswin.ops.linear.config import (
    OneShotConfig,
    SlicedConfig,
    default_one_shot_config,
    default_sliced_config,
)


@triton.jit
def _channels(FIRST: tl.constexpr, EACH: tl.constexpr, STRIDE: tl.constexpr, SLICES: tl.constexpr):
    """Channel numbers: ``[1, EACH]``, or ``[SLICES, 1, EACH]`` with STRIDE between slices."""
    if SLICES == 1:
        return FIRST + tl.arange(0, EACH)[None, :]
    else:
        first = FIRST + tl.arange(0, SLICES)[:, None, None] * STRIDE
        return first + tl.arange(0, EACH)[None, None, :]


@triton.jit
def _down(row, SLICES: tl.constexpr):
    """A vector over rows, broadcastable to a tile of activations."""
    if SLICES == 1:
        return row[:, None]
    else:
        return row[None, :, None]


@triton.jit
def _row_sums(v, SLICES: tl.constexpr):
    """Sums over the channels of a tile, ``[BLOCK_M]``."""
    if SLICES == 1:
        return tl.sum(v, 1)
    else:
        return tl.sum(tl.sum(v, 2), 0)


@triton.jit
def _load_rows(
    x_ptr, offset_ptr, row, valid, k, H, W, FIRST: tl.constexpr, EACH: tl.constexpr,
    K: tl.constexpr, SLICES: tl.constexpr, GATHER: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """Channels ``k`` of the activations' rows, offset added; in their dtype without one.

    To gather, a slice is a neighbour: (row, column) even-even, odd-even, even-odd, odd-odd.
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
        at = _down(row.to(tl.int64) * K, SLICES) + k
        v = tl.load(x_ptr + at, mask=_down(valid, SLICES), other=0.0)
        if HAS_OFFSET:
            v = v.to(tl.float32) + tl.load(offset_ptr + k).to(tl.float32)
    return v


@triton.jit
def _multiply(x, w, acc, SLICES: tl.constexpr):
    """``acc + x @ w.T``, each slice by itself."""
    if SLICES == 1:
        return tl.dot(x, tl.trans(w), acc)
    else:
        return tl.dot(x, tl.permute(w, (0, 2, 1)), acc)


@triton.jit(do_not_specialize=["M"])
def _one_shot_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, offset_ptr, residual_ptr, out_ptr, M, H, W, eps,
    N: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr,
    NORMALIZE: tl.constexpr, GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_OFFSET: tl.constexpr, GELU: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per output tile; columns fastest."""
    launch_dependents(PDL)
    K: tl.constexpr = KA + KB
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    row = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = row < M
    EACH_A: tl.constexpr = KA // SLICES
    EACH_B: tl.constexpr = KB // SLICES if KB > 0 else 16
    FIRST_B: tl.constexpr = EACH_A if GATHER else KA
    ka = _channels(0, EACH_A, K // 4 if GATHER else EACH_A, SLICES)
    kb = _channels(FIRST_B, EACH_B, K // 4 if GATHER else EACH_B, SLICES)
    cols_valid = _down(col < N, SLICES)
    weight_at = weight_ptr + _down(col * K, SLICES)
    wa = tl.load(weight_at + ka, mask=cols_valid, other=0.0)
    if KB > 0:
        wb = tl.load(weight_at + kb, mask=cols_valid, other=0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    a = _load_rows(
        x_ptr, offset_ptr, row, valid, ka, H, W, 0, EACH_A, K, SLICES, GATHER, HAS_OFFSET
    )  # fmt: skip
    if KB > 0:
        b = _load_rows(
            x_ptr, offset_ptr, row, valid, kb, H, W, FIRST_B, EACH_B, K, SLICES, GATHER, HAS_OFFSET
        )  # fmt: skip
    at = row[:, None].to(tl.int64) * N + col[None, :]
    keep = valid[:, None] & (col < N)[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=keep, other=0.0).to(tl.float32)
    if NORMALIZE:
        a = a.to(tl.float32)
        total = _row_sums(a, SLICES)
        if KB > 0:
            b = b.to(tl.float32)
            total += _row_sums(b, SLICES)
        a -= _down(total / K, SLICES)
        square = _row_sums(a * a, SLICES)
        if KB > 0:
            b -= _down(total / K, SLICES)
            square += _row_sums(b * b, SLICES)
        rstd = 1.0 / tl.sqrt(square / K + eps)
        a *= _down(rstd, SLICES)
        if KB > 0:
            b *= _down(rstd, SLICES)
    if SLICES == 1:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        acc = tl.zeros([SLICES, BLOCK_M, BLOCK_N], tl.float32)
    acc = _multiply(a.to(dtype), wa, acc, SLICES)
    if KB > 0:
        acc = _multiply(b.to(dtype), wb, acc, SLICES)
    y = acc if SLICES == 1 else tl.sum(acc, 0)
    if HAS_BIAS:
        y += bias[None, :]
    if GELU:
        y = gelu(y)
    if HAS_RESIDUAL:
        y += residual
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["M"])
def _sliced_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, M,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SLICES: tl.constexpr, LINES: tl.constexpr,
    HAS_BIAS: tl.constexpr, GELU: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    NUM_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per output tile; a step multiplies SLICES * BLOCK_K channels at once."""
    launch_dependents(PDL)
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    first_col = tl.program_id(0) % tiles_n * BLOCK_N
    prefetch_l2(
        weight_ptr + first_col * K, tl.minimum(BLOCK_N, N - first_col) * K, LINES, PDL
    )  # fmt: skip
    row = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    col = first_col + tl.arange(0, BLOCK_N)
    valid = row < M
    cols_valid = col < N
    # a step covers consecutive channels, so that its loads are whole lines
    k = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    x_at = x_ptr + row.to(tl.int64)[None, :, None] * K + k
    weight_at = weight_ptr + col[None, :, None] * K + k
    if HAS_BIAS:
        bias = tl.load(bias_ptr + col, mask=cols_valid, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    acc = tl.zeros([SLICES, BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, SLICES * BLOCK_K, num_stages=NUM_STAGES):
        x = tl.load(x_at + start, mask=valid[None, :, None], other=0.0)
        w = tl.load(weight_at + start, mask=cols_valid[None, :, None], other=0.0)
        acc = tl.dot(x, tl.permute(w, (0, 2, 1)), acc)
    y = tl.sum(acc, 0)
    if HAS_BIAS:
        y += bias[None, :]
    if GELU:
        y = gelu(y)
    at = row[:, None].to(tl.int64) * N + col[None, :]
    keep = valid[:, None] & cols_valid[None, :]
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=keep)


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
) -> torch.Tensor:
    """Launch the one-shot GEMM on contiguous ``x [..., K]``, or ``[B, H, W, K / 4]`` to gather.

    ``eps`` None means no LayerNorm; otherwise as the public functions have it.
    """
    x, weight = x.contiguous(), weight.contiguous()
    N, K = weight.shape
    H, W = (x.shape[1], x.shape[2]) if gather else (1, 1)
    if out is None:
        shape = (x.shape[0], (H + 1) // 2, (W + 1) // 2) if gather else x.shape[:-1]
        out = x.new_empty(*shape, N)
    if out.numel() == 0:
        return out
    M = out.numel() // N
    capability = device_capability(x.device)
    if config is None:
        config = default_one_shot_config(M, N, K, multiprocessor_count(x.device), gather)
    columns = split_columns(K)  # of 4C: four times those of C
    assert columns is not None  # one_shot_blocker was asked before
    programs = cdiv(M, config.block_m) * cdiv(N, config.block_n)
    with on_device(x.device):
        _one_shot_linear_kernel[(programs,)](
            x, weight, x if bias is None else bias, x if offset is None else offset,
            x if residual is None else residual, out, M, H, W, 0.0 if eps is None else eps,
            N=N, KA=columns[0], KB=columns[1], BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            SLICES=config.slices, NORMALIZE=eps is not None, GATHER=gather,
            HAS_BIAS=bias is not None, HAS_OFFSET=offset is not None, GELU=activation == "gelu",
            HAS_RESIDUAL=residual is not None, num_warps=config.num_warps,
            **pdl_options(pdl, capability),
        )  # fmt: skip
    return out


def sliced_linear_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    config: SlicedConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Launch the sliced GEMM on contiguous ``x [..., K]``; see the public function."""
    x, weight = x.contiguous(), weight.contiguous()
    N, K = weight.shape
    if out is None:
        out = x.new_empty(*x.shape[:-1], N)
    if out.numel() == 0:
        return out
    M = x.numel() // K
    capability = device_capability(x.device)
    if config is None:
        config = default_sliced_config(M, N, K, multiprocessor_count(x.device), capability)
    programs = cdiv(M, config.block_m) * cdiv(N, config.block_n)
    with on_device(x.device):
        _sliced_linear_kernel[(programs,)](
            x, weight, x if bias is None else bias, x if residual is None else residual, out, M,
            N=N, K=K, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            SLICES=config.slices, LINES=next_power_of_2(cdiv(config.block_n * K, 64)),
            HAS_BIAS=bias is not None, GELU=activation == "gelu",
            HAS_RESIDUAL=residual is not None, NUM_STAGES=config.num_stages,
            num_warps=config.num_warps, **pdl_options(pdl, capability),
        )  # fmt: skip
    return out
