"""Split-K product for few rows, and the kernel that joins its sums.

    x [M, K]   weight [N, K]   ->   partials [S, M, N] fp32, one product per slice of K
    partials, bias [N], stream [M, N]   ->   stream, and its LayerNorm [M, N]

fc2 of a Swin at batch 1 has 196 rows, 384 columns and sums over 1,536 channels: 24 tiles of 64x64
leave most of the card idle while each walks 24 dependent steps (5 us of which arithmetic is a
tenth). Cut into four slices there is no loop at all: a program asks for its strip of weights before
it waits for the kernel in front (_triton/pdl.py), then for x, and multiplies once. No atomics and
no second launch: the sums are added, always in the same order, by the LayerNorm that reads the
stream next.

2 M N K FLOPs; ``M N K / width (width itemsize / BLOCK_M + width itemsize / BLOCK_N)`` bytes from L2
and ``8 S M N`` for the partial sums, written and read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, multiprocessor_count, on_device
from fastswin._triton.launch import on_grid
from fastswin._triton.math import (
    inverse_step,
    join_slices,
    normalize_rows,
    round_to_8_bits,
)
from fastswin._triton.pdl import pdl_options, wait_for_previous
from fastswin._triton.tiles import (
    MIN_DOT,
    MIN_DOT_8_BITS,
    cdiv,
    next_power_of_2,
    split_columns,
)
from fastswin.ops.split_k.config import NUM_WARPS, SplitKConfig, join_rows


@triton.jit(do_not_specialize=["M"])
def _split_k_linear_kernel(
    x_ptr, weight_ptr, out_ptr, M,
    N: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    PA: tl.constexpr, PB: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr, scale_ptr=None,
):  # fmt: skip
    """One program per slice (axis 1) and output tile (axis 0, columns fastest).

    8-bit products, int8's exact in int32, come with the factor of each column at ``scale_ptr``.
    Parts narrower than tensor cores multiply at once are held PA and PB wide, zeros behind them.
    """
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    part = tl.program_id(1)
    row = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = (row < M)[:, None]
    inside = (col < N)[:, None]
    ka = tl.arange(0, PA)[None, :]
    kb = tl.arange(0, PB)[None, :]
    inside_a = inside & (ka < KA) if PA > KA else inside
    inside_b = inside & (kb < KB) if PB > KB else inside
    valid_a = valid & (ka < KA) if PA > KA else valid
    valid_b = valid & (kb < KB) if PB > KB else valid
    ka += part * (KA + KB)
    kb += part * (KA + KB) + KA
    weight_at = weight_ptr + col[:, None] * K
    wa = tl.load(weight_at + ka, mask=inside_a, other=0.0)
    if KB > 0:
        wb = tl.load(weight_at + kb, mask=inside_b, other=0.0)
    wait_for_previous(PDL)
    x_at = x_ptr + row.to(tl.int64)[:, None] * K
    a = tl.load(x_at + ka, mask=valid_a, other=0.0)
    if KB > 0:
        b = tl.load(x_at + kb, mask=valid_b, other=0.0)
    sums: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    y = tl.dot(a, tl.trans(wa), out_dtype=sums)
    if KB > 0:
        y = tl.dot(b, tl.trans(wb), y, out_dtype=sums)
    if scale_ptr is not None:
        y = y.to(tl.float32) * tl.load(scale_ptr + col, mask=col < N, other=0.0)[None, :]
    at = (part.to(tl.int64) * M + row[:, None]) * N + col[None, :]
    tl.store(out_ptr + at, y, mask=valid & (col < N)[None, :])


@triton.jit
def _affine(y, weight_ptr, bias_ptr, col, mask, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + col, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit(do_not_specialize=["M"])
def _add_split_k_kernel(
    partials_ptr, stream_ptr, bias_ptr, norm_weight_ptr, norm_bias_ptr, out_ptr, M, eps,
    C: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr, S: tl.constexpr, BLOCK_M: tl.constexpr,
    PRE: tl.constexpr, POST: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr, HAS_NORM_BIAS: tl.constexpr, PDL: tl.constexpr,
    output_scale_ptr=None,
):  # fmt: skip
    """One program per BLOCK_M rows; columns in parts CA (padded when CB == 0) and CB.

    The norm in front of a product ("pre") is stored in 8 bits with the step at
    ``output_scale_ptr``.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = row.to(tl.int64)[:, None] * C
    size = M.to(tl.int64) * C
    ca = tl.arange(0, CA)[None, :]
    cb = CA + tl.arange(0, CB if CB > 0 else 16)[None, :]
    ma = (row < M)[:, None] & (ca < C)
    mb = (row < M)[:, None] & (cb < C)
    inverse = 1.0
    if output_scale_ptr is not None:
        inverse = inverse_step(tl.load(output_scale_ptr))
    wait_for_previous(PDL)
    a = join_slices(partials_ptr, bias_ptr, first + ca, size, ca, ma, S, HAS_BIAS)
    x = tl.load(stream_ptr + first + ca, mask=ma, other=0.0).to(tl.float32)
    b = a
    z = x
    if CB > 0:
        b = join_slices(partials_ptr, bias_ptr, first + cb, size, cb, mb, S, HAS_BIAS)
        z = tl.load(stream_ptr + first + cb, mask=mb, other=0.0).to(tl.float32)
    if not POST:
        a += x
        b += z
        tl.store(stream_ptr + first + ca, a.to(stream_ptr.dtype.element_ty), mask=ma)
        if CB > 0:
            tl.store(stream_ptr + first + cb, b.to(stream_ptr.dtype.element_ty), mask=mb)
    if PRE or POST:
        if CA > C:  # padded columns must not enter the sums
            mean = tl.sum(a, 1) / C
            a = tl.where(ca < C, a - mean[:, None], 0.0)
            a *= (1.0 / tl.sqrt(tl.sum(a * a, 1) / C + eps))[:, None]
        else:
            a, b = normalize_rows(a, b, C, CB, eps)
        if POST:
            a = x + _affine(
                a, norm_weight_ptr, norm_bias_ptr, ca, ca < C, HAS_NORM_WEIGHT, HAS_NORM_BIAS
            )
        if output_scale_ptr is not None:
            a = round_to_8_bits(a * inverse, out_ptr.dtype.element_ty)
        tl.store(out_ptr + first + ca, a.to(out_ptr.dtype.element_ty), mask=ma)
        if CB > 0:
            if POST:
                b = z + _affine(
                    b, norm_weight_ptr, norm_bias_ptr, cb, cb < C, HAS_NORM_WEIGHT, HAS_NORM_BIAS
                )
            if output_scale_ptr is not None:
                b = round_to_8_bits(b * inverse, out_ptr.dtype.element_ty)
            tl.store(out_ptr + first + cb, b.to(out_ptr.dtype.element_ty), mask=mb)


def split_k_linear_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: SplitKConfig,
    pdl: bool = False,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the product on ``x [..., K]``; returns ``[splits, ..., N]`` fp32."""
    N, K = weight.shape
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty(config.splits, *x.shape[:-1], N, dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out
    M = x.numel() // K
    columns = split_columns(K // config.splits)
    assert columns is not None  # config_blocker was asked before
    depth = MIN_DOT if scale is None else MIN_DOT_8_BITS
    grid = (cdiv(M, config.block_m) * cdiv(N, config.block_n), config.splits)
    with on_device(x.device):
        on_grid(_split_k_linear_kernel, grid)(
            x, weight, out, M, N=N, K=K, KA=columns[0], KB=columns[1],
            PA=max(columns[0], depth), PB=max(columns[1], depth), BLOCK_M=config.block_m,
            BLOCK_N=config.block_n, scale_ptr=scale, num_warps=config.num_warps,
            **pdl_options(pdl, device_capability(x.device)),
        )  # fmt: skip
    return out


def add_split_k_fwd(
    partials: torch.Tensor,
    stream: torch.Tensor,
    bias: torch.Tensor | None,
    norm: str,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    pdl: bool = False,
    output_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """Launch the joining kernel on contiguous tensors; see the public function."""
    C = stream.shape[-1]
    out = torch.empty_like(stream, dtype=dtype) if norm == "pre" else None
    if stream.numel() == 0:
        return out
    M = stream.numel() // C
    columns = split_columns(C) or (next_power_of_2(C), 0)
    block_m = join_rows(M, C, multiprocessor_count(stream.device))
    with on_device(stream.device):
        on_grid(_add_split_k_kernel, (cdiv(M, block_m),))(
            partials, stream, stream if bias is None else bias,
            stream if norm_weight is None else norm_weight,
            stream if norm_bias is None else norm_bias,
            stream if out is None else out, M, eps,
            C=C, CA=columns[0], CB=columns[1], S=partials.shape[0], BLOCK_M=block_m,
            PRE=norm == "pre", POST=norm == "post", HAS_BIAS=bias is not None,
            HAS_NORM_WEIGHT=norm_weight is not None, HAS_NORM_BIAS=norm_bias is not None,
            output_scale_ptr=output_scale, num_warps=NUM_WARPS,
            **pdl_options(pdl, device_capability(stream.device)),
        )  # fmt: skip
    return out
