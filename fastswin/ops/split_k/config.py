"""How a split product is cut; imports no Triton.

``M`` rows, ``N`` output and ``K`` input channels, ``splits`` slices of K.
"""

from __future__ import annotations

import dataclasses

import torch

from fastswin._triton.device import device_capability
from fastswin._triton.tiles import (
    MIN_DOT,
    cdiv,
    next_power_of_2,
    split_columns,
    why_not_dot,
)

#: Widest slice that a program holds, a power of two, and else: 64 rows and 64 columns of it are 128
#: and 96 KB of shared memory. 384 channels as 256 + 128 took 5.0 us where 512 took 5.5 (H200).
MAX_SLICE, MAX_UNEVEN_SLICE = 512, 384

#: Part of the multiprocessors that 64x64 tiles have to fill before K is cut into more slices.
FILLED = 0.68

#: First compute capability whose tensor cores read both operands from shared memory.
MIN_CAPABILITY = (9, 0)

#: Slices that the joining kernel adds at most.
MAX_SPLITS = 16

#: fp32 values of one slice's tile in the joining kernel.
TILE_ELEMENTS = 2048

NUM_WARPS = 4


@dataclasses.dataclass(frozen=True)
class SplitKConfig:
    """Launch options of the product.

    Attributes:
        splits: slices of K, each ``K / splits`` channels wide, one or two powers of two.
        block_m, block_n: tile of the product.
        num_warps: warps per program.
    """

    splits: int
    block_m: int
    block_n: int
    num_warps: int


def default_split_k_config(M: int, N: int, K: int, multiprocessors: int) -> SplitKConfig | None:
    """Tiles of 64x64, cut into the fewest slices that a program holds and that fill the GPU.

    Best or within 0.25 us of the best of 299 configurations at ten sizes of Swin-T, B and V2-T at
    batch 1 (H200, docs/performance.md).

    Returns:
        None where K cannot be cut (see :func:`split_k_blocker`).
    """
    possible = _possible_splits(K)
    if not possible:
        return None
    block_m = min(64, max(MIN_DOT, next_power_of_2(M)))
    block_n = min(64, max(MIN_DOT, next_power_of_2(N)))
    programs = cdiv(M, block_m) * cdiv(N, block_n)
    filling = (s for s in possible if s * programs >= FILLED * multiprocessors)
    return SplitKConfig(next(filling, possible[-1]), block_m, block_n, 4)


def split_k_blocker(K: int) -> str | None:
    """Reason why K cannot be cut into slices that a program holds, None where it can."""
    if not _possible_splits(K):
        return (
            f"{K} input channels are not at most {MAX_SPLITS} equal slices of one or two powers of "
            f"two up to {MAX_SLICE}"
        )
    return None


def why_no_split_k(device: torch.device) -> str | None:
    """Reason why a GPU cannot run the product, None where it can.

    Older tensor cores read operands from registers, where whole slices of them do not fit.
    """
    if device.type != "cuda" or device_capability(device) >= MIN_CAPABILITY:
        return None
    return "split-K products need the tensor cores of compute capability 9.0"


def config_blocker(config: SplitKConfig, K: int) -> str | None:
    """Reason why a configuration does not fit K channels, None where it does."""
    if not 1 <= config.splits <= MAX_SPLITS or K % config.splits:
        return f"splits must divide {K} and be 1 to {MAX_SPLITS}, got {config.splits}"
    if not _held(K // config.splits):
        return f"slices of {K // config.splits} channels are not one or two powers of two"
    return why_not_dot({"block_m": config.block_m, "block_n": config.block_n}, {})


def _possible_splits(K: int) -> list[int]:
    """Numbers of slices that a program can hold, fewest first, none narrower than 128 channels."""
    return [
        splits
        for splits in range(1, MAX_SPLITS + 1)
        if K % splits == 0 and (splits == 1 or K // splits >= 128) and _held(K // splits)
    ]


def _held(width: int) -> bool:
    """Whether a program holds slices of so many channels."""
    columns = split_columns(width)
    return columns is not None and width <= (MAX_UNEVEN_SLICE if columns[1] else MAX_SLICE)


def join_rows(rows: int, channels: int, multiprocessors: int) -> int:
    """Rows of one program of the joining kernel: fewer where the GPU would idle."""
    most = max(1, min(16, TILE_ELEMENTS // next_power_of_2(channels)))
    while most > 1 and cdiv(rows, most) < multiprocessors:
        most //= 2
    return most
