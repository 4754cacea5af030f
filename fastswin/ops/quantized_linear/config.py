"""Tile sizes of the 8-bit GEMM and the heuristic that picks them.

``M`` rows (tokens), ``N`` output and ``K`` input channels, all operands of one byte.
"""

from __future__ import annotations

import dataclasses

from fastswin._triton.tiles import MIN_DOT, cdiv, why_not_dot

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


def config_blocker(config: QuantizedGemmConfig) -> str | None:
    """Reason why no tensor core multiplies these tiles, None where they do."""
    sides = {"block_m": config.block_m, "block_n": config.block_n}
    return why_not_dot(sides, {"block_k": config.block_k}, narrow=True)


def default_quantized_gemm_config(
    M: int,
    N: int,
    K: int,
    multiprocessors: int,
    capability: tuple[int, int],
    narrow_output: bool,
    residual: bool,
    *,
    gelu: bool = False,
    fp8: bool = False,
) -> QuantizedGemmConfig:
    """Heuristic from measurements on an H100 (quantized_linear_sweep.txt of its records).

    Args:
        M, N, K: rows, output and input channels.
        multiprocessors, capability: of the GPU that runs it.
        narrow_output: whether the result is stored in 8 bits.
        residual: whether a residual is added.
        gelu: whether GELU is applied.
        fp8: whether operands are e4m3, not int8.
    """
    tma = capability >= (9, 0) and K % 16 == 0
    if not (tma and capability[0] in (9, 10)):
        return _small_memory_config(M, N, K, multiprocessors, tma)
    store = narrow_output and N % 16 == 0
    if (N % 128 and N <= 256) or (residual and N == 128 and M > 50_000):
        # 192 and 96 channels: tiles of 128 columns would be a quarter padding; few columns of many
        # rows are bound by the stream, which more programs read faster
        block_n, large = 64, cdiv(M, 128) * cdiv(N, 64)
    elif narrow_output and N % 64 == 0 and 96 < K <= 192:
        block_n = 64 if N % 128 else 128  # q, k and v of 192 channels end at tiles of 64
        large = cdiv(M, 128) * cdiv(N, block_n)
        if N % 128 == 0 and multiprocessors <= large < 4 * multiprocessors:
            return QuantizedGemmConfig(64, 128, 64, 4, 4, True, tma_store=store)
    else:
        block_n, large = 128, cdiv(M, 128) * cdiv(N, 128)
    if large < multiprocessors:
        return _few_tiles_config(M, N, K, multiprocessors, store, gelu, fp8)
    if block_n == 64:
        shallow = K <= 192 or (N > 128 and M > 50_000)
        block_k, stages = (64, 4) if shallow else (128, 3)
        return QuantizedGemmConfig(128, 64, _depth(K, block_k), 4, stages, True, 3, store)
    if not narrow_output and _one_shot(M, K, large, multiprocessors, residual):
        return QuantizedGemmConfig(64, 128, _depth(K, 128), 4, 3, True)
    return QuantizedGemmConfig(128, 128, _depth(K, 128), 4, 3, True, 2, store)


def _one_shot(M: int, K: int, large: int, multiprocessors: int, residual: bool) -> bool:
    """Whether a wide result is faster from 64 rows a program, without walking programs.

    ``large`` counts tiles of 128 x 128. Long products hide what walking costs, and many short ones
    fill the card evenly either way; without a residual only the uneven end of a first wave counts.
    """
    if residual:
        return M <= 25088 and K < 3072 and (K > 384 or large < 4 * multiprocessors)
    return K < 1536 and large < 1.5 * multiprocessors


def _few_tiles_config(
    M: int, N: int, K: int, multiprocessors: int, store: bool, gelu: bool, fp8: bool
) -> QuantizedGemmConfig:
    """Fewer tiles of 128 rows than multiprocessors: smaller tiles, as deep as memory allows."""
    if fp8 and not store and K >= 1536 and M >= 1024:  # fp8 sums leave faster than int8's
        return QuantizedGemmConfig(128, 128, 128, 4, 3, True, 2)
    if N % 128 == 0 and cdiv(M, 64) * cdiv(N, 128) >= 1.5 * multiprocessors:
        return QuantizedGemmConfig(64, 128, _depth(K, 128), 4, 3, True, tma_store=store)
    tiles = cdiv(M, 64) * cdiv(N, 64)
    if tiles >= multiprocessors // 2:
        store = store and K >= 512 and not gelu
        if K >= 512 and tiles <= multiprocessors:
            return QuantizedGemmConfig(64, 64, 256, 4, 3, True, tma_store=store)
        return QuantizedGemmConfig(64, 64, _depth(K, 128), 4, 4, True, tma_store=store)
    deep = 256 if K >= 512 else _depth(K, 128)
    return QuantizedGemmConfig(64 if M > 32 else MIN_DOT, 32, deep, 4, 4, True)


def _small_memory_config(
    M: int, N: int, K: int, multiprocessors: int, tma: bool
) -> QuantizedGemmConfig:
    """Cards with 99 to 163 KiB of shared memory, and rows that the copy engine cannot read."""
    block_k, wide_n = _depth(K, 64), N % 128 == 0 or N > 256
    if cdiv(M, 128) * cdiv(N, 128 if wide_n else 64) >= multiprocessors:
        return QuantizedGemmConfig(128, 128 if wide_n else 64, block_k, 8, 3, tma)
    if cdiv(M, 64) * cdiv(N, 64) >= multiprocessors // 2:
        return QuantizedGemmConfig(64, 64, block_k, 4, 3, tma)
    return QuantizedGemmConfig(64 if M > 32 else MIN_DOT, 32, block_k, 4, 3, tma)


def _depth(K: int, most: int) -> int:
    """Depth of a step, at most ``most``: no deeper than K needs."""
    return min(most, 128 if K > 64 else (64 if K > 32 else 32))


def quantized_linear_blocker(N: int, K: int) -> str | None:
    """Reason why the kernel cannot take these sizes, None where it can."""
    if K > MAX_K:
        return f"{K} input channels exceed {MAX_K}: int32 sums could overflow"
    if N < 1 or K < 1:
        return f"the weight [{N}, {K}] is empty"
    return None
