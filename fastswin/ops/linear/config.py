"""Tile sizes of the GEMM kernels and the heuristic that picks them.

``M`` rows (tokens), ``N`` output and ``K`` input channels. Numbers behind the choices:
docs/performance.md.
"""

from __future__ import annotations

import dataclasses

from fastswin._triton.tiles import MIN_DOT, cdiv, next_power_of_2, split_columns

#: Widest row that the LayerNorm-fused kernel keeps on chip.
MAX_LAYER_NORM_K = 1024


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


def layer_norm_linear_blocker(K: int) -> str | None:
    """Reason why ``K`` input channels cannot stay on chip, None where they can."""
    if K > MAX_LAYER_NORM_K:
        return f"{K} input channels exceed {MAX_LAYER_NORM_K}"
    if split_columns(K) is None:
        return f"{K} input channels are not one or two powers of two of at least {MIN_DOT}"
    return None
