"""Tiles of the product whose programs own whole rows; imports no Triton.

``C`` output channels, ``K`` input channels. A program of ``block_m`` rows keeps ``block_m * C``
sums in registers, as one to four equal parts of a power of two of columns (384 = 3 x 128), and each
step of ``block_k`` input channels brings ``(block_m + C) * block_k`` operands into shared memory,
``num_stages`` of which are there at once.
"""

from __future__ import annotations

import dataclasses

from fastswin._triton.tiles import MIN_DOT_8_BITS, why_not_dot

#: Most parts of a row, and widest part: the copy engine's boxes have at most 256 rows.
MAX_PARTS, MAX_WIDTH = 4, 256

#: Fewest stages of the pipeline: Triton 3.6 raced shared operands of loops without one.
MIN_STAGES = 2

#: Sums that a thread may hold, by warps: half of 255 registers, or three quarters of 128, where up
#: to 168 bytes are spilled. 192 spilled 300 to 500 bytes on compute capability 9.0.
MAX_SUMS = {4: 128, 8: 128, 16: 96}

#: The same for the heuristic, without spills: from 9.0 on, where operands are multiplied from
#: shared memory, and below, where they lie in registers too.
DEFAULT_SUMS, DEFAULT_SUMS_BELOW = {4: 128, 8: 128, 16: 64}, {4: 64, 8: 64, 16: 32}

#: Shared memory of a program that a generation allows, bytes, by compute capability; what is not
#: listed counts as the smallest.
SHARED_BYTES = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
SHARED_BYTES_EVERYWHERE = 99 << 10

#: Of that, left to sums that cross warps and to barriers.
SPARE_BYTES = 4 << 10


@dataclasses.dataclass(frozen=True)
class LinearNormConfig:
    """Launch options.

    Attributes:
        block_m: rows of a program.
        width: columns of one part of a row; one to four parts make up C.
        block_k: input channels of a step.
        num_warps: warps per program.
        num_stages: depth of the load pipeline over K, at least 2.
        tma: operands come through the tensor copy engine (compute capability 9.0 and later).
        early: the residual is asked for before the products, not behind them; its values wait in
            registers.
    """

    block_m: int
    width: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool = False
    early: bool = False


def default_linear_norm_config(
    M: int, C: int, K: int, itemsize: int, capability: tuple[int, int]
) -> LinearNormConfig | None:
    """Heuristic for ``M`` rows; None where no tiles fit (:func:`linear_norm_blocker`).

    64 rows are what one group of four warps multiplies on Hopper; fewer rows a program where those
    would leave most of the card idle.
    """
    width = part_width(C)
    if width is None:
        return None
    tma = capability >= (9, 0) and K * itemsize % 16 == 0
    most = DEFAULT_SUMS if capability >= (9, 0) else DEFAULT_SUMS_BELOW
    rows = (64, 32, 16) if M > 2048 else (16,)
    for block_m in rows:
        for block_k in (128 // itemsize, 64 // itemsize, MIN_DOT_8_BITS if itemsize == 1 else 16):
            for stages in (3, 2):
                for warps in (w for w in most if block_m * C <= 32 * w * most[w]):
                    config = LinearNormConfig(block_m, width, block_k, warps, stages, tma)
                    if linear_norm_blocker(C, K, itemsize, capability, config) is None:
                        return config
    return None


def part_width(C: int) -> int | None:
    """Columns of a part, a power of two that makes up C in few; None if there is none."""
    for most in (3, MAX_PARTS):  # 2 x 256 columns are 10 % faster than 4 x 128 (H200)
        for width in (128, 256, 64, 32, 16):
            if C % width == 0 and C // width <= most:
                return width
    return None


def linear_norm_blocker(
    C: int,
    K: int,
    itemsize: int,
    capability: tuple[int, int],
    config: LinearNormConfig | None = None,
) -> str | None:
    """Reason why no program holds such rows, None where one does.

    Args:
        C, K: output and input channels.
        itemsize: bytes of an operand.
        capability: of the GPU.
        config: tiles to be checked, or None for the shape alone.
    """
    if capability < (8, 0):
        return "whole rows of sums need the tensor cores of compute capability 8.0"
    if part_width(C) is None:
        return f"{C} channels are not one to {MAX_PARTS} times a power of two of 16 to {MAX_WIDTH}"
    if config is None:
        if default_linear_norm_config(1 << 20, C, K, itemsize, capability) is None:
            return f"no tiles of rows of {C} channels fit compute capability {capability}"
        return None
    sides = {"block_m": config.block_m, "width": config.width}
    if reason := why_not_dot(sides, {"block_k": config.block_k}, narrow=itemsize == 1):
        return reason
    if config.width > MAX_WIDTH or C % config.width or C // config.width > MAX_PARTS:
        return (
            f"width must be at most {MAX_WIDTH} and make up {C} channels in 1 to {MAX_PARTS} "
            f"parts, got {config.width}"
        )
    if config.num_stages < MIN_STAGES:
        return f"num_stages must be at least {MIN_STAGES}, got {config.num_stages}"
    if config.num_warps not in MAX_SUMS:
        return f"num_warps must be one of {tuple(MAX_SUMS)}, got {config.num_warps}"
    sums = config.block_m * C // (32 * config.num_warps)
    if sums > MAX_SUMS[config.num_warps]:
        return f"{sums} sums a thread of {config.num_warps} warps exceed its registers"
    if config.tma and (capability < (9, 0) or K * itemsize % 16):
        return f"tma needs compute capability 9.0 and rows of a multiple of 16 bytes, K is {K}"
    needed = config.num_stages * (config.block_m + C) * config.block_k * itemsize + SPARE_BYTES
    limit = SHARED_BYTES.get(capability, SHARED_BYTES_EVERYWHERE)
    if needed > limit:
        return f"{needed >> 10} KiB of operands exceed the {limit >> 10} KiB of shared memory"
    return None
