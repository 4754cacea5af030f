"""Tile sizes of the 8-bit GEMM and the heuristic that picks them.

``M`` rows (tokens), ``N`` output and ``K`` input channels, all operands of one byte.
"""

from __future__ import annotations

import dataclasses

from fastswin._triton.tiles import MIN_DOT, cdiv

#: int32 holds a sum of this many products of int8 numbers: 2**17 * 127 * 127 < 2**31.
MAX_K = 1 << 17


@dataclasses.dataclass(frozen=True)
class QuantizedGemmConfig:
    """Launch options of the 8-bit GEMM.

    Attributes:
        block_m, block_n, block_k: tile of the product.
        num_warps: warps per program.
        num_stages: depth of the load pipeline over K.
        tma: operands come through the tensor copy engine (compute capability 9.0 and later).
        persistent: programs walk over several tiles; 0 gives one program per tile, n gives at
            most n programs per multiprocessor.
        tma_store: an 8-bit result leaves through the copy engine too; needs ``tma``.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool = False
    persistent: int = 0
    tma_store: bool = False


def default_quantized_gemm_config(
    M: int,
    N: int,
    K: int,
    multiprocessors: int,
    capability: tuple[int, int],
    narrow_output: bool,
    residual: bool,
) -> QuantizedGemmConfig:
    """Heuristic from measurements on an H100.

    Args:
        M, N, K: rows, output and input channels.
        multiprocessors, capability: of the GPU that runs it.
        narrow_output: whether the result is stored in 8 bits.
        residual: whether a residual is added.
    """
    tma = capability >= (9, 0) and K % 16 == 0
    hopper = tma and capability[0] in (9, 10)  # 227 KiB of shared memory; the others have 99 to 163
    block_k = 128 if K > 64 else (64 if K > 32 else 32)
    tma_store = tma and narrow_output and N % 16 == 0
    if not hopper:
        block_k = min(block_k, 64)
    wide_n = N % 128 == 0 or N > 256
    large = cdiv(M, 128) * cdiv(N, 128 if wide_n else 64)
    if hopper and residual and M <= 25088 and cdiv(M, 64) * cdiv(N, 128) >= multiprocessors:
        return QuantizedGemmConfig(64, 128 if wide_n else 64, block_k, 4, 3, tma)
    if large >= multiprocessors:
        if hopper:
            block_n, programs = (128, 2) if wide_n else (64, 3)
            return QuantizedGemmConfig(128, block_n, block_k, 4, 3, tma, programs, tma_store)
        return QuantizedGemmConfig(128, 128 if wide_n else 64, block_k, 8, 3, tma)
    if cdiv(M, 64) * cdiv(N, 64) >= multiprocessors // 2:
        return QuantizedGemmConfig(64, 64, block_k, 4, 4 if hopper else 3, tma)
    deep = 256 if hopper and K >= 512 else block_k
    return QuantizedGemmConfig(64 if M > 32 else MIN_DOT, 32, deep, 4, 4 if hopper else 3, tma)


def quantized_linear_blocker(N: int, K: int) -> str | None:
    """Reason why the kernel cannot take these sizes, None where it can."""
    if K > MAX_K:
        return f"{K} input channels exceed {MAX_K}: int32 sums could overflow"
    if N < 1 or K < 1:
        return f"the weight [{N}, {K}] is empty"
    return None
