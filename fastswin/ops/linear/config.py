"""Tile sizes of the GEMM kernels and the heuristic that picks them.

``M`` rows (tokens), ``N`` output and ``K`` input channels. Numbers behind the choices:
docs/performance.md.
"""

from __future__ import annotations

import dataclasses

import torch

from fastswin._triton.device import device_capability
from fastswin._triton.tiles import MIN_DOT, cdiv, next_power_of_2, split_columns
from fastswin.ops.hopper_resident.config import ResidentProductConfig

#: Widest row that the LayerNorm-fused kernel keeps on chip.
MAX_LAYER_NORM_K = 1024

#: Widest row of the one-shot kernel: 16 rows and 16 columns of it are 48 K values in registers.
MAX_ONE_SHOT_K = 1536


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Launch options of the tiled GEMM.

    Attributes:
        block_m, block_n, block_k: tile of the product.
        num_warps: warps per program.
        num_stages: depth of the load pipeline over K.
        tma: operands come through the tensor copy engine (compute capability 9.0 and later).
        persistent: programs walk over several tiles; 0 gives one program per tile, n gives at
            most n programs per multiprocessor.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool = False
    persistent: int = 0


@dataclasses.dataclass(frozen=True)
class LayerNormLinearConfig:
    """Launch options of the x-stationary kernel (a program keeps its normalised rows).

    Attributes:
        block_m: rows per program.
        block_n: output columns per step.
        column_splits: programs that share the columns of one row block.
        num_warps: warps per program.
        num_stages: depth of the weight pipeline over column steps.
    """

    block_m: int
    block_n: int
    column_splits: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class OneShotConfig:
    """Launch options of the GEMM without a loop over K (one_shot.py).

    Attributes:
        block_m, block_n: tile of the product.
        num_warps: warps per program.
    """

    block_m: int
    block_n: int
    num_warps: int


#: Options of a product without LayerNorm, and of one with.
LinearConfig = GemmConfig | OneShotConfig
NormLinearConfig = LayerNormLinearConfig | OneShotConfig | ResidentProductConfig


def default_gemm_config(
    M: int, N: int, K: int, multiprocessors: int, capability: tuple[int, int]
) -> GemmConfig:
    """Heuristic for half-precision operands."""
    tma = capability >= (9, 0) and K % 8 == 0 and N % 8 == 0
    if capability < (8, 0):  # no tensor-core code there: fewer values per thread
        return GemmConfig(64, 64, 32, num_warps=8, num_stages=2)
    block_n = 128 if N % 128 == 0 or N > 512 else 64
    large = cdiv(M, 128) * cdiv(N, block_n)
    if large >= 2 * multiprocessors:
        if not tma:
            return GemmConfig(128, block_n, 32, num_warps=8, num_stages=3)
        persistent = 2 if block_n == 128 else 3
        return GemmConfig(128, block_n, 64 if K % 64 == 0 else 32, 4, 3, tma, persistent)
    if large >= multiprocessors // 2 and tma and block_n == 128:
        return GemmConfig(128, 128, 64, 4, 3, tma, persistent=2)
    if large >= multiprocessors // 2:
        return GemmConfig(64, 128, 64, 4, 4 if tma else 3, tma)
    if cdiv(M, 64) * cdiv(N, 64) >= multiprocessors // 2:
        return GemmConfig(64, 64, 64, 4, 4 if tma else 3, tma)
    return GemmConfig(64 if M > 32 else MIN_DOT, 32, 128 if tma else 64, 4, 4 if tma else 3, tma)


def default_layer_norm_linear_config(
    M: int, N: int, K: int, multiprocessors: int, capability: tuple[int, int]
) -> LayerNormLinearConfig | None:
    """Heuristic; None where the kernel does not apply (see :func:`layer_norm_linear_blocker`)."""
    if layer_norm_linear_blocker(K) is not None:
        return None
    tensor_cores = capability >= (8, 0)  # without, operands fill the registers
    widest = 64 if tensor_cores else (32 if K <= 128 else MIN_DOT)
    block_n = min(widest, max(MIN_DOT, next_power_of_2(N)))
    steps = cdiv(N, block_n)
    large_enough = K <= 128 and 128 * multiprocessors <= M and tensor_cores
    if large_enough:
        return LayerNormLinearConfig(128, min(block_n, 32), 1, num_warps=8, num_stages=3)
    block_m = 64 if tensor_cores else (32 if K <= 128 else MIN_DOT)
    # split columns, then rows, until every multiprocessor has a program
    while block_m > MIN_DOT and (
        block_m * K > 32 * 512 or cdiv(M, block_m) * steps < multiprocessors
    ):
        block_m //= 2
    row_blocks = cdiv(M, block_m)
    splits = min(steps, max(1, cdiv(2 * multiprocessors, row_blocks)))
    splits = cdiv(steps, cdiv(steps, splits))
    stages = 1 if splits == steps or not tensor_cores else 2
    num_warps = 4 if tensor_cores else 8
    return LayerNormLinearConfig(block_m, block_n, splits, num_warps, num_stages=stages)


def default_tf32_config(
    M: int, N: int, K: int, multiprocessors: int, capability: tuple[int, int]
) -> GemmConfig:
    """Heuristic for fp32 operands: a stage of 128 x 128 x 32 takes 32 KiB, two programs 192."""
    tma = capability >= (9, 0) and K % 4 == 0
    if cdiv(M, 128) * cdiv(N, 128) >= multiprocessors:
        block_n = 128 if capability[0] in (9, 10) else 64  # elsewhere 99 to 163 KiB
        warps = 8 if block_n == 128 else 4  # rows go through registers, to be rounded
        return GemmConfig(128, block_n, 32, warps, num_stages=3, tma=tma)
    if cdiv(M, 64) * cdiv(N, 64) >= multiprocessors // 2:
        return GemmConfig(64, 64, 32, 4, 4 if tma else 3, tma)
    return GemmConfig(64 if M > 32 else MIN_DOT, 32, 32, 4, 4 if tma else 3, tma)


def default_tf32_layer_norm_config(
    M: int, N: int, K: int, multiprocessors: int, capability: tuple[int, int]
) -> LayerNormLinearConfig | None:
    """Heuristic for fp32 operands; None as above. Rows are halved until theirs fit."""
    if layer_norm_linear_blocker(K) is not None:
        return None
    block_m = 64 if K <= 192 else MIN_DOT
    splits = min(cdiv(N, 32), max(1, cdiv(2 * multiprocessors, cdiv(M, block_m))))
    return LayerNormLinearConfig(block_m, 32, splits, num_warps=4, num_stages=2)


def layer_norm_linear_blocker(K: int) -> str | None:
    """Reason why ``K`` input channels cannot stay on chip, None where they can."""
    if K > MAX_LAYER_NORM_K:
        return f"{K} input channels exceed {MAX_LAYER_NORM_K}"
    if split_columns(K) is None:
        return f"{K} input channels are not one or two powers of two of at least {MIN_DOT}"
    return None


def default_one_shot_config(
    M: int, N: int, K: int, multiprocessors: int, gather: bool = False
) -> OneShotConfig:
    """Heuristic: the largest tile that gives every multiprocessor two programs.

    A program holds its rows in fp32, its strip of weights in half precision and one accumulator, or
    to gather one for each of four neighbours; half of its registers may go there.
    """
    accumulators = 4 if gather else 1
    tiles = ((64, 64), (32, 64), (64, 32), (32, 32), (16, 32), (16, 16))
    chosen = OneShotConfig(*tiles[-1], num_warps=8)
    for block_m, block_n in tiles:
        if block_m >= 2 * max(M, MIN_DOT) or block_n >= 2 * max(N, MIN_DOT):
            continue
        values = block_m * K + block_n * K // 2 + accumulators * block_m * block_n
        warps = next((count for count in (4, 8, 16) if _registers_fit(values, count)), None)
        if warps is None:
            continue
        chosen = OneShotConfig(block_m, block_n, warps)
        if cdiv(M, block_m) * cdiv(N, block_n) >= 2 * multiprocessors:
            break
    return chosen


def _registers_fit(values: int, warps: int) -> bool:
    threads = 32 * warps
    return values <= 0.5 * threads * min(255, 65536 // threads)


def why_no_one_shot(device: torch.device) -> str | None:
    """Reason why a GPU cannot run the one-shot kernels, None where it can."""
    if device.type != "cuda" or device_capability(device) >= (8, 0):
        return None
    return "one-shot products need the tensor cores of compute capability 8.0"


def one_shot_blocker(K: int) -> str | None:
    """Reason why a program cannot hold whole rows of K channels, None where it can."""
    if K > MAX_ONE_SHOT_K:
        return f"{K} input channels exceed {MAX_ONE_SHOT_K}"
    if split_columns(K) is None:
        return f"{K} input channels are not one or two powers of two of at least {MIN_DOT}"
    return None
