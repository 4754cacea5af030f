"""GEMMs of a Swin block in Triton, with what comes before and after them.

    x [M, K]   weight [N, K]   bias [N] fp32   residual, out [M, N]

Two kernels. The tiled GEMM streams K through shared memory and adds bias, GELU and residual before
its only store: 2 M N K FLOPs, (M K + N K + M N) * itemsize bytes. The x-stationary kernel serves
small K with a LayerNorm in front: a program normalises its rows once, keeps them in registers and
lets the weight walk by, so the normalised activations never exist in memory.

The A tile of the tiled GEMM must not also feed a reduction: LayerNorm sums taken from the pipelined
tiles gave wrong, run-to-run varying results under Triton 3.6 (docs/performance.md, traps).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, multiprocessor_count, on_device
from fastswin._triton.launch import on_grid
from fastswin._triton.math import gelu, gelu_erf, nearest_tf32, normalize_rows
from fastswin._triton.pdl import pdl_options, wait_for_previous
from fastswin._triton.tensor_copy import COPY_BYTES
from fastswin._triton.tiles import cdiv, split_columns
from fastswin.ops.hopper_gemm.config import HopperGemmConfig, measured_config
from fastswin.ops.hopper_resident.config import ResidentProductConfig, chosen_product
from fastswin.ops.linear.config import (
    GemmConfig,
    LayerNormLinearConfig,
    default_gemm_config,
    default_layer_norm_linear_config,
    default_tf32_config,
    default_tf32_layer_norm_config,
)
from fastswin.ops.linear.operands import prepare_operands


@triton.jit
def _store_tile(
    acc, bias_ptr, residual_ptr, out_ptr, tile_m, tile_n, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, GELU: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Epilogue: bias, GELU, residual, one store of ``[BLOCK_M, BLOCK_N]``."""
    row = tl.arange(0, BLOCK_M)
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    keep = (tile_m * BLOCK_M + row < M)[:, None] & (col < N)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    if GELU:
        acc = gelu_erf(acc) if PRECISION == "tf32x3" else gelu(acc)
    base = tile_m.to(tl.int64) * BLOCK_M * N
    at = row[:, None] * N + col[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + base + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + base + at, acc.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _rounded(x, PRECISION: tl.constexpr):
    """Activations as tensor cores are to read them."""
    if x.dtype == tl.float32 and PRECISION == "tf32":
        x = nearest_tf32(x)
    return x


@triton.jit(do_not_specialize=["M"])
def _linear_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, GELU: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    NUM_STAGES: tl.constexpr, PDL: tl.constexpr = False, PRECISION: tl.constexpr = "tf32",
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
    wait_for_previous(PDL)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        if EVEN_K:
            x = tl.load(x_at + start, mask=rows_valid, other=0.0)
            w = tl.load(weight_at + start, mask=cols_valid, other=0.0)
        else:
            k_valid = (start + k < K)[None, :]
            x = tl.load(x_at + start, mask=rows_valid & k_valid, other=0.0)
            w = tl.load(weight_at + start, mask=cols_valid & k_valid, other=0.0)
        x = _rounded(x, PRECISION)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    _store_tile(
        acc, bias_ptr, residual_ptr, out_ptr, tile_m, tile_n, M, N, BLOCK_M, BLOCK_N,
        HAS_BIAS, GELU, HAS_RESIDUAL, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _linear_fwd_tma_kernel(
    x_desc, weight_desc, bias_ptr, residual_ptr, out_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, GELU: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    NUM_STAGES: tl.constexpr, PERSISTENT: tl.constexpr, PDL: tl.constexpr = False,
    PRECISION: tl.constexpr = "tf32",
):  # fmt: skip
    """As above, operands by the tensor copy engine; PERSISTENT programs walk over tiles."""
    wait_for_previous(PDL)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(M, BLOCK_M) * tiles_n
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            tile_m = tile // tiles_n
            tile_n = tile % tiles_n
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
                x = _rounded(x_desc.load([tile_m * BLOCK_M, start]), PRECISION)
                w = weight_desc.load([tile_n * BLOCK_N, start])
                acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
            _store_tile(
                acc, bias_ptr, residual_ptr, out_ptr, tile_m, tile_n, M, N, BLOCK_M, BLOCK_N,
                HAS_BIAS, GELU, HAS_RESIDUAL, PRECISION,
            )  # fmt: skip
    else:
        tile_m = tl.program_id(0) // tiles_n
        tile_n = tl.program_id(0) % tiles_n
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            x = _rounded(x_desc.load([tile_m * BLOCK_M, start]), PRECISION)
            w = weight_desc.load([tile_n * BLOCK_N, start])
            acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
        _store_tile(
            acc, bias_ptr, residual_ptr, out_ptr, tile_m, tile_n, M, N, BLOCK_M, BLOCK_N,
            HAS_BIAS, GELU, HAS_RESIDUAL, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _layer_norm_linear_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, offset_ptr, out_ptr, M, eps,
    N: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMN_SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_OFFSET: tl.constexpr, GELU: tl.constexpr,
    NUM_STAGES: tl.constexpr, PDL: tl.constexpr = False, PRECISION: tl.constexpr = "tf32",
):  # fmt: skip
    """x-stationary: one program keeps LN(x) ``[BLOCK_M, KA + KB]`` and walks over columns."""
    K: tl.constexpr = KA + KB
    steps: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    steps_each: tl.constexpr = (steps + COLUMN_SPLITS - 1) // COLUMN_SPLITS
    split = tl.program_id(0) % COLUMN_SPLITS
    tile_m = tl.program_id(0) // COLUMN_SPLITS
    row = tl.arange(0, BLOCK_M)
    valid = (tile_m * BLOCK_M + row < M)[:, None]
    ka = tl.arange(0, KA)
    kb = KA + tl.arange(0, KB if KB > 0 else 16)
    x_ptr += tile_m.to(tl.int64) * BLOCK_M * K
    out_ptr += tile_m.to(tl.int64) * BLOCK_M * N
    wait_for_previous(PDL)
    a = tl.load(x_ptr + row[:, None] * K + ka[None, :], mask=valid, other=0.0)
    dtype = a.dtype
    a = a.to(tl.float32)
    b = a
    if KB > 0:
        b = tl.load(x_ptr + row[:, None] * K + kb[None, :], mask=valid, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        a += tl.load(offset_ptr + ka).to(tl.float32)[None, :]
        if KB > 0:
            b += tl.load(offset_ptr + kb).to(tl.float32)[None, :]
    a, b = normalize_rows(a, b, K, KB, eps)
    a = _rounded(a.to(dtype), PRECISION)
    b = _rounded(b.to(dtype), PRECISION)
    for step in tl.range(0, steps_each, num_stages=NUM_STAGES):
        col = (split * steps_each + step) * BLOCK_N + tl.arange(0, BLOCK_N)
        cols_valid = (col < N)[:, None]
        w = tl.load(weight_ptr + col[:, None] * K + ka[None, :], mask=cols_valid, other=0.0)
        acc = tl.dot(a, tl.trans(w), input_precision=PRECISION)
        if KB > 0:
            w = tl.load(weight_ptr + col[:, None] * K + kb[None, :], mask=cols_valid, other=0.0)
            acc = tl.dot(b, tl.trans(w), acc, input_precision=PRECISION)
        if HAS_BIAS:
            acc += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        if GELU:
            acc = gelu_erf(acc) if PRECISION == "tf32x3" else gelu(acc)
        keep = valid & (col < N)[None, :]
        at = out_ptr + row[:, None] * N + col[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=keep)


def linear_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    config: GemmConfig | HopperGemmConfig | None = None,
    pdl: bool = False,
    input_precision: str | None = None,
) -> torch.Tensor:
    """Launch the tiled GEMM on ``x [..., K]``; see the public function."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    given = prepare_operands(x, weight, bias, None, residual, out)
    out, M, N, K = given.out, given.M, given.N, given.K
    if out.numel() == 0:
        return out
    multiprocessors = multiprocessor_count(x.device)
    if config is None and residual is None and activation == "gelu":
        config = measured_config("linear", M, N, K, x.dtype, x.device)
    aligned = not (given.x.data_ptr() | given.weight.data_ptr() | out.data_ptr()) % COPY_BYTES
    if isinstance(config, HopperGemmConfig):
        if aligned:
            from fastswin.ops.hopper_gemm.launch import hopper_linear_fwd

            rows = given.x.view(M, K), given.weight, given.bias
            hopper_linear_fwd(
                *rows, gelu=activation == "gelu", out=out.view(M, N), config=config, pdl=pdl
            )
            return out
        config = None
    if config is None:
        heuristic = default_gemm_config if input_precision is None else default_tf32_config
        config = heuristic(M, N, K, multiprocessors, device_capability(x.device))
    tiles = cdiv(M, config.block_m) * cdiv(N, config.block_n)
    constants = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "HAS_BIAS": bias is not None, "GELU": activation == "gelu",
        "HAS_RESIDUAL": residual is not None, "NUM_STAGES": config.num_stages,
        "PRECISION": input_precision or "tf32",
        "num_warps": config.num_warps, **pdl_options(pdl, device_capability(x.device)),
    }  # fmt: skip
    pointers = given.pointers("bias", "residual", "out")
    with on_device(x.device):
        if config.tma and not (given.x.data_ptr() | given.weight.data_ptr()) % COPY_BYTES:
            operands = (
                TensorDescriptor.from_tensor(given.x.view(M, K), [config.block_m, config.block_k]),
                TensorDescriptor.from_tensor(given.weight, [config.block_n, config.block_k]),
            )
            programs = tiles
            if config.persistent:
                programs = min(tiles, config.persistent * multiprocessors)
            on_grid(_linear_fwd_tma_kernel, (programs,))(
                *operands, *pointers, M, N, K, **constants, PERSISTENT=config.persistent > 0
            )
        else:
            on_grid(_linear_fwd_kernel, (tiles,))(
                given.x, given.weight, *pointers, M, N, K, **constants,
                EVEN_K=K % config.block_k == 0,
            )  # fmt: skip
    return out


def layer_norm_linear_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    eps: float,
    offset: torch.Tensor | None,
    out: torch.Tensor | None,
    config: LayerNormLinearConfig | ResidentProductConfig | None = None,
    pdl: bool = False,
    input_precision: str | None = None,
) -> torch.Tensor:
    """Launch the x-stationary kernel on ``x [..., K]``, or the one that keeps the weight.

    See the public function.
    """
    given = prepare_operands(x, weight, bias, offset, None, out)
    out, M, N, K = given.out, given.M, given.N, given.K
    if out.numel() == 0:
        return out
    if config is None and activation is None:
        config = chosen_product(M, N, K, x.dtype, x.device)
    if isinstance(config, ResidentProductConfig):
        if not (given.x.data_ptr() | given.weight.data_ptr() | out.data_ptr()) % COPY_BYTES:
            from fastswin.ops.hopper_resident.launch import resident_product_fwd

            resident_product_fwd(
                given.x.view(M, K), given.weight, given.bias, given.offset, eps, out.view(M, N),
                config,
            )  # fmt: skip
            return out
        config = None
    if config is None:
        heuristic = (
            default_layer_norm_linear_config
            if input_precision is None
            else default_tf32_layer_norm_config
        )
        config = heuristic(M, N, K, multiprocessor_count(x.device), device_capability(x.device))
    columns = split_columns(K)
    assert config is not None  # layer_norm_linear_blocker was asked before
    assert columns is not None
    programs = cdiv(M, config.block_m) * config.column_splits
    with on_device(x.device):
        on_grid(_layer_norm_linear_fwd_kernel, (programs,))(
            *given.pointers("x", "weight", "bias", "offset", "out"), M, eps,
            N=N, KA=columns[0], KB=columns[1], BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            COLUMN_SPLITS=config.column_splits, HAS_BIAS=bias is not None,
            HAS_OFFSET=offset is not None, GELU=activation == "gelu", NUM_STAGES=config.num_stages,
            PRECISION=input_precision or "tf32", num_warps=config.num_warps,
            **pdl_options(pdl, device_capability(x.device)),
        )  # fmt: skip
    return out
