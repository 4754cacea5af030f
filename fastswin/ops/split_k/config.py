"""How a split product is cut; imports no Triton.

``M`` rows, ``N`` output and ``K`` input channels, ``splits`` slices of K.
"""

from __future__ import annotations

import dataclasses

from fastswin._triton.tiles import MIN_DOT, cdiv, next_power_of_2, split_columns

#: Widest slice that a program holds: 64 columns of it are half of the registers of 4 warps.
MAX_SLICE = 512

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
    """The fewest slices a program can hold, then the largest tile that fills half the GPU.

    Returns:
        None where K cannot be cut (see :func:`split_k_blocker`).
    """
    if split_k_blocker(K) is not None:
        return None
    splits = _fewest_splits(K)
    assert splits is not None
    chosen = SplitKConfig(splits, MIN_DOT, 64, 4)
    for block_m, block_n in ((64, 64), (32, 64), (16, 64), (32, 32), (16, 32)):
        if block_m >= 2 * max(M, MIN_DOT) or block_n >= 2 * max(N, MIN_DOT):
            continue
        chosen = SplitKConfig(splits, block_m, block_n, 4)
        if 2 * splits * cdiv(M, block_m) * cdiv(N, block_n) >= multiprocessors:
            break
    return chosen


def split_k_blocker(K: int) -> str | None:
    """Reason why K cannot be cut into slices that a program holds, None where it can."""
    if _fewest_splits(K) is None:
        return (
            f"{K} input channels are not at most {MAX_SPLITS} equal slices of one or two powers of "
            f"two up to {MAX_SLICE}"
        )
    return None


def config_blocker(config: SplitKConfig, K: int) -> str | None:
    """Reason why a configuration does not fit K channels, None where it does."""
    if not 1 <= config.splits <= MAX_SPLITS or K % config.splits:
        return f"splits must divide {K} and be 1 to {MAX_SPLITS}, got {config.splits}"
    if K // config.splits > MAX_SLICE or split_columns(K // config.splits) is None:
        return f"slices of {K // config.splits} channels are not one or two powers of two"
    return None


def _fewest_splits(K: int) -> int | None:
    for splits in range(1, MAX_SPLITS + 1):
        if K % splits == 0 and K // splits <= MAX_SLICE and split_columns(K // splits) is not None:
            return splits
    return None


def join_rows(rows: int, channels: int, multiprocessors: int) -> int:
    """Rows of one program of the joining kernel: fewer where the GPU would idle."""
    most = max(1, min(16, TILE_ELEMENTS // next_power_of_2(channels)))
    while most > 1 and cdiv(rows, most) < multiprocessors:
        most //= 2
    return most
