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

#: Widest rows that a program of :class:`HeadGroupConfig` keeps whole beside the weights of a head:
#: 64 rows of 512 channels and 96 rows of weights take 160 KiB.
MAX_RESIDENT_CHANNELS = 512

#: Widest rows that a program of :class:`WholeWindowConfig` accumulates: 64 x 192 fp32 sums take
#: 96 registers a thread, of 256 channels 744 bytes are spilled on Hopper.
MAX_WHOLE_CHANNELS = 192


@dataclasses.dataclass(frozen=True)
class HeadGroupConfig:
    """Launch options of the form without proj: one program per window and group of heads.

    Attributes:
        heads_per_program: heads that one program walks over; weights of a single one are loaded
            before the wait (_triton/pdl.py).
        block_k: channels of one step of the projections; 0 keeps whole rows on chip.
        num_warps: warps per program.
        num_stages: depth of the load pipeline over steps, or over heads with whole rows.
    """

    heads_per_program: int
    block_k: int = 0
    num_warps: int = 4
    num_stages: int = 1


@dataclasses.dataclass(frozen=True)
class WholeWindowConfig:
    """Launch options of the form with proj and residual: one program per window.

    Attributes:
        num_warps: warps per program.
        num_stages: depth of the weight pipeline over heads; 1 has none, and never with ``tma``
            (illegal memory accesses under Triton 3.6).
        tma: weights come through the tensor copy engine (compute capability 9.0 and later).
        max_registers: limit per thread, so that more programs share a multiprocessor; 0 sets none.
    """

    num_warps: int = 4
    num_stages: int = 1
    tma: bool = False
    max_registers: int = 0


AttentionHalfConfig = HeadGroupConfig | WholeWindowConfig


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


def default_head_group_config(
    windows: int, C: int, num_heads: int, multiprocessors: int, capability: tuple[int, int]
) -> HeadGroupConfig:
    """Heuristic: one head a program unless that gives every multiprocessor several.

    Args:
        windows: windows in the whole batch.
        C, num_heads: channels and heads of the stage.
        multiprocessors, capability: of the GPU that runs it.
    """
    # older tensor cores read weights from registers: a whole strip of them spills
    roomy = capability[0] in (9, 10)
    if C > (MAX_RESIDENT_CHANNELS if roomy else 96) or column_parts(C) is None:
        return HeadGroupConfig(1, 64 if C % 64 == 0 else 32, num_stages=5 if roomy else 3)
    heads = 1
    if C <= 128:
        for candidate in range(2, min(num_heads, 4) + 1):
            programs = windows * num_heads // candidate
            if num_heads % candidate == 0 and programs >= 3 * multiprocessors:
                heads = candidate
    return HeadGroupConfig(heads, 0, num_stages=2 if heads > 1 else 1)


def default_whole_window_config(C: int, capability: tuple[int, int]) -> WholeWindowConfig:
    """Heuristic: no pipeline, whose buffers would leave room for two programs instead of three.

    Older tensor cores read weights from registers, which a pipeline keeps in shared memory longer.
    """
    if capability[0] not in (9, 10):
        return WholeWindowConfig(num_warps=4 if C <= 96 else 8, num_stages=2)
    if C > 128:  # spills otherwise, and two programs are all that fit in any case
        return WholeWindowConfig(num_stages=2, tma=True)
    return WholeWindowConfig(num_stages=1, max_registers=168 if C <= 96 else 0)


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
    expected = WholeWindowConfig if whole else HeadGroupConfig
    if config is not None and not isinstance(config, expected):
        return f"config must be a {expected.__name__}, got {type(config).__name__}"
    if whole and C > MAX_WHOLE_CHANNELS:
        return f"{C} channels exceed {MAX_WHOLE_CHANNELS}"
    parts = column_parts(C)
    if whole and parts is None:
        return f"{C} channels are not one or three times a power of two of at least {MIN_DOT}"
    if isinstance(config, WholeWindowConfig) and config.tma and config.num_stages < 2:
        return "weights by the copy engine need num_stages of at least 2"
    if isinstance(config, HeadGroupConfig):
        return _tiles_blocker(C, num_heads, parts, config)
    if not whole and parts is None and C % 32:
        return f"{C} channels are neither a power of two, three times one, nor a multiple of 32"
    return None


def _tiles_blocker(
    C: int, num_heads: int, parts: tuple[int, int] | None, config: HeadGroupConfig
) -> str | None:
    if num_heads % config.heads_per_program:
        return f"{config.heads_per_program} heads per program do not divide {num_heads}"
    if config.block_k and (config.heads_per_program > 1 or C % config.block_k):
        return f"steps of {config.block_k} channels must divide {C} and serve one head"
    if not config.block_k and (parts is None or C > MAX_RESIDENT_CHANNELS):
        return f"rows of {C} channels do not stay on chip"
    return None
