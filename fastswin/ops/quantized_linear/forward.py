"""The 8-bit GEMM in Triton, with everything around the product in its epilogue.

    x [M, K]   weight [N, K]   one byte each      scale, bias [N]   row_scale [M]   fp32
    out [M, N]: y = acc * scale (* row_scale) + bias, GELU, then residual or rounding to 8 bits

int8 sums are int32 and exact; fp8 sums are fp32, in the tensor cores' fast accumulation on Hopper
(1e-3 to 2e-3 of the result, beside 3e-2 of fp8's own rounding). 2 M N K operations,
M K + N K + M N * itemsize bytes. Both operands lie along K, as 8-bit tensor-core products want.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, multiprocessor_count, on_device
from fastswin._triton.launch import on_grid
from fastswin._triton.math import (
    gelu,
    gelu_to_8_bits,
    inverse_step,
    round_to_8_bits,
    scale_to_8_bits,
    scaled_gelu,
)
from fastswin._triton.pdl import pdl_options, prefetch_l2, wait_for_previous
from fastswin._triton.tiles import cdiv, next_power_of_2
from fastswin.ops.quantize.reference import LARGEST
from fastswin.ops.quantized_linear.config import (
    QuantizedGemmConfig,
    default_quantized_gemm_config,
)

#: Most lines of 128 bytes that a program asks for before its predecessor is done: 256 KiB.
PREFETCH_LINES = 2048


@triton.jit
def _prefetch_weight(
    weight_ptr, tile_n, N, K, BLOCK_N: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr
):
    """The tile's rows ``[BLOCK_N, K]`` lie side by side; no kernel of the chain writes them."""
    first = tile_n * BLOCK_N
    prefetch_l2(weight_ptr + first * K, tl.minimum(N - first, BLOCK_N) * K, LINES, PDL)


@triton.jit
def _output_inverses(output_scale_ptr, PARTS: tl.constexpr):
    """One over the output's steps of q, k and v; PARTS 1 has one step three times."""
    q = 1.0
    k = 1.0
    v = 1.0
    if output_scale_ptr is not None:
        q = inverse_step(tl.load(output_scale_ptr))
        k = q
        v = q
        if PARTS == 3:
            k = inverse_step(tl.load(output_scale_ptr + 1))
            v = inverse_step(tl.load(output_scale_ptr + 2))
    return q, k, v


@triton.jit
def _tile_inverse(
    q, k, v, tile_n, N, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, PART_PER_TILE: tl.constexpr
):
    """One over the step of a tile: a number, or one a column ``[1, BLOCK_N]``."""
    third = N // 3
    if PARTS == 1:
        inverse = q
    elif PART_PER_TILE:
        first = tile_n * BLOCK_N
        inverse = tl.where(first < third, q, tl.where(first < 2 * third, k, v))
    else:
        col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        inverse = tl.where(col < third, q, tl.where(col < 2 * third, k, v))[None, :]
    return inverse


@triton.jit
def _store_tile(
    acc, scale_ptr, bias_ptr, row_scale_ptr, residual_ptr, output_scale_ptr, out_ptr, out_desc,
    inverse_q, inverse_k, inverse_v, tile_m, tile_n, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GELU: tl.constexpr, PARTS: tl.constexpr,
    PART_PER_TILE: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Epilogue of one tile ``[BLOCK_M, BLOCK_N]`` and its only store."""
    row = tl.arange(0, BLOCK_M)
    rows_valid = tile_m * BLOCK_M + row < M
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    cols_valid = col < N
    keep = rows_valid[:, None] & cols_valid[None, :]
    y = acc.to(tl.float32) * tl.load(scale_ptr + col, mask=cols_valid, other=0.0)[None, :]
    if row_scale_ptr is not None:
        y *= tl.load(row_scale_ptr + tile_m * BLOCK_M + row, mask=rows_valid, other=0.0)[:, None]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + col, mask=cols_valid, other=0.0)[None, :]
    if GELU and (output_scale_ptr is None or PARTS == 3):
        y = gelu(y)
    base = tile_m.to(tl.int64) * BLOCK_M * N
    at = row[:, None] * N + col[None, :]
    if output_scale_ptr is not None:
        inverse = _tile_inverse(
            inverse_q, inverse_k, inverse_v, tile_n, N, BLOCK_N, PARTS, PART_PER_TILE
        )
        if row_scale_ptr is not None:  # a step of a token may be NaN
            y = scaled_gelu(y, inverse) if GELU and PARTS == 1 else y * inverse
            stored = round_to_8_bits(y, out_ptr.dtype.element_ty)
        elif GELU and PARTS == 1:  # integer sums and calibrated steps are finite
            stored = gelu_to_8_bits(y, inverse, out_ptr.dtype.element_ty)
        else:
            stored = scale_to_8_bits(y, inverse, out_ptr.dtype.element_ty)
        if ORDERED:  # columns are in ordering.py's order, the result is not
            pairs = tl.reshape(stored, [BLOCK_M, BLOCK_N // 16, 2, 4, 2])
            stored = tl.reshape(tl.permute(pairs, [0, 1, 3, 2, 4]), [BLOCK_M, BLOCK_N])
        if out_desc is not None:
            out_desc.store([tile_m * BLOCK_M, tile_n * BLOCK_N], stored)
        else:
            tl.store(out_ptr + base + at, stored, mask=keep)
    else:
        if residual_ptr is not None:
            y += tl.load(residual_ptr + base + at, mask=keep, other=0.0).to(tl.float32)
        tl.store(out_ptr + base + at, y.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["M"])
def _quantized_linear_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, row_scale_ptr, residual_ptr, output_scale_ptr, out_ptr,
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    GELU: tl.constexpr, PARTS: tl.constexpr, PART_PER_TILE: tl.constexpr, ORDERED: tl.constexpr,
    NUM_STAGES: tl.constexpr, LINES: tl.constexpr = 1, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program per output tile, operands by pointers; columns fastest."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m = tl.program_id(0) // tiles_n
    tile_n = tl.program_id(0) % tiles_n
    row = tl.arange(0, BLOCK_M)
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows_valid = (tile_m * BLOCK_M + row < M)[:, None]
    cols_valid = (col < N)[:, None]
    x_at = x_ptr + tile_m.to(tl.int64) * BLOCK_M * K + row[:, None] * K + k[None, :]
    weight_at = weight_ptr + col[:, None] * K + k[None, :]
    sums: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    inverse_q, inverse_k, inverse_v = _output_inverses(output_scale_ptr, PARTS)
    _prefetch_weight(weight_ptr, tile_n, N, K, BLOCK_N, LINES, PDL)
    wait_for_previous(PDL)
    acc = tl.zeros([BLOCK_M, BLOCK_N], sums)
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        if EVEN_K:
            x = tl.load(x_at + start, mask=rows_valid, other=0.0)
            w = tl.load(weight_at + start, mask=cols_valid, other=0.0)
        else:
            k_valid = (start + k < K)[None, :]
            x = tl.load(x_at + start, mask=rows_valid & k_valid, other=0.0)
            w = tl.load(weight_at + start, mask=cols_valid & k_valid, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, out_dtype=sums)
    _store_tile(
        acc, scale_ptr, bias_ptr, row_scale_ptr, residual_ptr, output_scale_ptr, out_ptr, None,
        inverse_q, inverse_k, inverse_v, tile_m, tile_n, M, N, BLOCK_M, BLOCK_N, GELU, PARTS,
        PART_PER_TILE, ORDERED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _quantized_linear_tma_kernel(
    x_desc, weight_desc, weight_ptr, scale_ptr, bias_ptr, row_scale_ptr, residual_ptr,
    output_scale_ptr, out_ptr, out_desc, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GELU: tl.constexpr, PARTS: tl.constexpr, PART_PER_TILE: tl.constexpr, ORDERED: tl.constexpr,
    NUM_STAGES: tl.constexpr, PERSISTENT: tl.constexpr, LINES: tl.constexpr = 1,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """As above, operands (and ``out_desc``) by the copy engine; PERSISTENT programs walk."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(M, BLOCK_M) * tiles_n
    sums: tl.constexpr = tl.int32 if x_desc.dtype == tl.int8 else tl.float32
    inverse_q, inverse_k, inverse_v = _output_inverses(output_scale_ptr, PARTS)
    _prefetch_weight(weight_ptr, tl.program_id(0) % tiles_n, N, K, BLOCK_N, LINES, PDL)
    wait_for_previous(PDL)
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            tile_m = tile // tiles_n
            tile_n = tile % tiles_n
            acc = tl.zeros([BLOCK_M, BLOCK_N], sums)
            for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
                x = x_desc.load([tile_m * BLOCK_M, start])
                w = weight_desc.load([tile_n * BLOCK_N, start])
                acc = tl.dot(x, w.T, acc, out_dtype=sums)
            _store_tile(
                acc, scale_ptr, bias_ptr, row_scale_ptr, residual_ptr, output_scale_ptr, out_ptr,
                out_desc, inverse_q, inverse_k, inverse_v, tile_m, tile_n, M, N, BLOCK_M, BLOCK_N,
                GELU, PARTS, PART_PER_TILE, ORDERED,
            )  # fmt: skip
    else:
        tile_m = tl.program_id(0) // tiles_n
        tile_n = tl.program_id(0) % tiles_n
        acc = tl.zeros([BLOCK_M, BLOCK_N], sums)
        for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            x = x_desc.load([tile_m * BLOCK_M, start])
            w = weight_desc.load([tile_n * BLOCK_N, start])
            acc = tl.dot(x, w.T, acc, out_dtype=sums)
        _store_tile(
            acc, scale_ptr, bias_ptr, row_scale_ptr, residual_ptr, output_scale_ptr, out_ptr,
            out_desc, inverse_q, inverse_k, inverse_v, tile_m, tile_n, M, N, BLOCK_M, BLOCK_N, GELU,
            PARTS, PART_PER_TILE, ORDERED,
        )  # fmt: skip


def quantized_linear_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    config: QuantizedGemmConfig | None = None,
    pdl: bool = False,
    ordered: bool = False,
) -> torch.Tensor:
    """Launch on ``x [..., K]``; see the public function. ``dtype``: of the result."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, weight = x.contiguous(), weight.contiguous()
    N, K = weight.shape
    if out is None:
        out = torch.empty(*x.shape[:-1], N, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    M = x.numel() // K
    multiprocessors = multiprocessor_count(x.device)
    if config is None:
        config = default_quantized_gemm_config(
            M, N, K, multiprocessors, device_capability(x.device), dtype in LARGEST,
            residual is not None, gelu=activation == "gelu", fp8=weight.dtype != torch.int8,
        )  # fmt: skip
    tiles = cdiv(M, config.block_m) * cdiv(N, config.block_n)
    parts = 1 if output_scale is None else output_scale.numel()
    # walking programs that wait would take the places of those before them (docs/performance.md)
    dependent = pdl_options(pdl and not config.persistent, device_capability(x.device))
    lines = next_power_of_2(cdiv(config.block_n * K, 128)) if dependent["PDL"] else 1
    constants = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "GELU": activation == "gelu", "PARTS": parts,
        "PART_PER_TILE": N // parts % config.block_n == 0, "ORDERED": ordered,
        "NUM_STAGES": config.num_stages, "num_warps": config.num_warps,
        "LINES": min(lines, PREFETCH_LINES), **dependent,
    }  # fmt: skip
    pointers = (
        scale.contiguous(),
        None if bias is None else bias.contiguous(),
        None if row_scale is None else row_scale.contiguous(),
        None if residual is None else residual.contiguous(),
        output_scale,
        out,
    )
    _check_alignment(config, N, K)
    with on_device(x.device):
        if config.tma:
            x, weight = _aligned(x), _aligned(weight)
            operands = (
                TensorDescriptor.from_tensor(x.view(M, K), [config.block_m, config.block_k]),
                TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
            )
            target = None
            if config.tma_store and output_scale is not None and out.data_ptr() % 16 == 0:
                block = [config.block_m, config.block_n]
                target = TensorDescriptor.from_tensor(out.view(M, N), block)
            programs = tiles
            if config.persistent:
                programs = min(tiles, config.persistent * multiprocessors)
            on_grid(_quantized_linear_tma_kernel, (programs,))(
                *operands, weight, *pointers, target, M, N, K, **constants,
                PERSISTENT=config.persistent > 0,
            )  # fmt: skip
        else:
            on_grid(_quantized_linear_kernel, (tiles,))(
                x, weight, *pointers, M, N, K, **constants, EVEN_K=K % config.block_k == 0
            )
    return out


def _check_alignment(config: QuantizedGemmConfig, N: int, K: int) -> None:
    """Raise ValueError where the copy engine cannot read or write rows of these lengths."""
    if config.tma and K % 16:
        raise ValueError(f"config: tma needs rows of a multiple of 16 bytes, x has {K}")
    if config.tma_store and (N % 16 or not config.tma):
        raise ValueError(f"config: tma_store needs tma and N a multiple of 16, N is {N}")


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """The copy engine reads from addresses that are multiples of 16 bytes."""
    return t if t.data_ptr() % 16 == 0 else t.clone()
