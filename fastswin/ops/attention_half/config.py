"""Two ways to cut the attention half into programs, their tiles, and where each can run.

Numbers behind the choices: docs/performance.md.
"""

from __future__ import annotations

import dataclasses

from fastswin._triton.tiles import MIN_DOT, next_power_of_2

#: Longest window: its rows are one tile of a program.
MAX_TOKENS = 64

#: Head dims of the kernels, powers of two.
HEAD_DIMS = (16, 32, 64)

#: Fewest stages of a loop over products: outside a pipeline, Triton 3.6 let programs overwrite
#: operands that the tensor cores still read (wrong results, illegal accesses; H200).
MIN_STAGES = 2

#: Widest rows that a program of :class:`WholeWindowConfig` accumulates: 64 x 192 fp32 sums take
#: 96 registers a thread, of 256 channels 744 bytes are spilled on Hopper.
MAX_WHOLE_CHANNELS = 192


@dataclasses.dataclass(frozen=True)
class HeadsConfig:
    """Launch options of the form without proj: one program per window and head.

    Attributes:
        block_k: channels of one step of the projections.
        num_warps: warps per program.
        num_stages: depth of the load pipeline over steps, at least 2.
    """

    block_k: int
    num_warps: int = 4
    num_stages: int = 3


@dataclasses.dataclass(frozen=True)
class WholeWindowConfig:
    """Launch options of the form with proj and residual: one program per window.

    Attributes:
        num_warps: warps per program.
        num_stages: depth of the weight pipeline over heads, at least 2.
        tma: weights come through the tensor copy engine (compute capability 9.0 and later).
        max_registers: limit per thread, so that more programs share a multiprocessor; 0 sets none.
    """

    num_warps: int = 4
    num_stages: int = 2
    tma: bool = False
    max_registers: int = 0


AttentionHalfConfig = HeadsConfig | WholeWindowConfig


def row_tile(tokens: int) -> int:
    """Rows of a program's tiles for windows of ``tokens``; also the packed bias's ``NP``."""
    return max(MIN_DOT, next_power_of_2(tokens))


def column_parts(C: int) -> tuple[int, int] | None:
    """``C`` channels as one or three equal powers of two: (width, parts), None if impossible.

    Equal parts share a layout of threads, so statistics of a row are added up before threads
    exchange them, and nothing is moved between layouts.
    """
    width, parts = (C // 3, 3) if C % 3 == 0 else (C, 1)
    return (width, parts) if width >= MIN_DOT and width & (width - 1) == 0 else None


def default_heads_config(C: int, capability: tuple[int, int]) -> HeadsConfig:
    """Heuristic: the widest steps, three of which are under way (H200, docs/performance.md)."""
    widest = 128 if capability[0] in (9, 10) else 64
    block_k = next(k for k in (widest, 64, 32, MIN_DOT) if C % k == 0)
    return HeadsConfig(block_k)


def default_whole_window_config(C: int, capability: tuple[int, int]) -> WholeWindowConfig:
    """Heuristic: two stages of weights; of many channels three, by the copy engine."""
    if capability[0] not in (9, 10):
        return WholeWindowConfig(num_warps=4 if C <= 96 else 8)
    return WholeWindowConfig() if C <= 128 else WholeWindowConfig(num_stages=3, tma=True)


def attention_half_blocker(
    C: int,
    num_heads: int,
    tokens: int,
    whole: bool,
    map_elements: int = 0,
    config: AttentionHalfConfig | None = None,
) -> str | None:
    """Reason why no kernel holds such a half, None where one does.

    Args:
        C, num_heads: channels and heads of the stage.
        tokens: of one window.
        whole: whether proj and residual belong to it.
        map_elements: ``H * W * C``, tokens of one image are addressed in 32 bits.
        config: tiles to be checked, or None.
    """
    if tokens > MAX_TOKENS:
        return f"{tokens} tokens a window exceed {MAX_TOKENS}"
    if C % num_heads or C // num_heads not in HEAD_DIMS:
        return f"{C} channels in {num_heads} heads: head_dim must be one of {HEAD_DIMS}"
    if map_elements >= 2**31:
        return f"{map_elements} elements an image exceed 2**31 - 1"
    expected = WholeWindowConfig if whole else HeadsConfig
    if config is not None and not isinstance(config, expected):
        return f"config must be a {expected.__name__}, got {type(config).__name__}"
    if whole and C > MAX_WHOLE_CHANNELS:
        return f"{C} channels exceed {MAX_WHOLE_CHANNELS}"
    parts = column_parts(C)
    if whole and parts is None:
        return f"{C} channels are not one or three times a power of two of at least {MIN_DOT}"
    if config is not None and config.num_stages < MIN_STAGES:
        return f"num_stages must be at least {MIN_STAGES}, got {config.num_stages}"
    if isinstance(config, HeadsConfig) and (config.block_k < MIN_DOT or C % config.block_k):
        return f"steps of {config.block_k} channels must divide {C} and be at least {MIN_DOT}"
    if not whole and C % MIN_DOT:
        return f"{C} channels are no multiple of {MIN_DOT}"
    return None
