"""Two ways to cut the attention half into programs, their tiles, and where each can run.

Numbers behind the choices: docs/performance.md.
"""

from __future__ import annotations

import dataclasses

from fastswin._triton.available import why_no_gluon
from fastswin._triton.tiles import MIN_DOT, cdiv, next_power_of_2

#: Longest window: its rows are one tile of a program.
MAX_TOKENS = 64

#: Head dims of the kernels, powers of two.
HEAD_DIMS = (16, 32, 64)

#: Fewest stages of a loop over products: outside a pipeline, Triton 3.6 let programs overwrite
#: operands that the tensor cores still read (wrong results, illegal accesses; H200).
MIN_STAGES = 2

#: Fewest and most channels of :class:`HopperHeadsConfig`: two tiles of rows, and weights that leave
#: room for most of the rows' tiles (192 bytes a channel of weights, 128 of rows).
MIN_HOPPER_CHANNELS, MAX_HOPPER_CHANNELS = 128, 768

#: Shared memory of a program of it, less what barriers and alignment take.
HOPPER_BYTES = 226 * 1024

#: Bytes of weights and rows that a program of :class:`HopperWindowsConfig` may hold, less than the
#: 227 KiB of compute capability 9.0 by what vectors and the barrier take.
WINDOWS_BYTES = 226 * 1024

#: Registers that the compiler leaves a thread of all its groups but the first, by groups.
WINDOWS_REGISTERS = {1: 0, 2: 240, 3: 168}

#: Columns of a tile of :class:`HopperWholeConfig` by channels, a power of two that divides them;
#: weights of a half of more channels leave no room.
HOPPER_WHOLE_WIDTH = {96: 32, 128: 64}

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


@dataclasses.dataclass(frozen=True)
class HopperHeadsConfig:
    """The form by heads of compute capability 9.0 (hopper_heads.py); it has no tiles to choose."""


@dataclasses.dataclass(frozen=True)
class HopperWindowsConfig:
    """The form by heads of compute capability 9.0 for many windows (hopper_windows.py).

    Attributes:
        windows: of a program, which fetches its head's weights once.
        groups: warp groups that share them, each with windows of its own, 1 to 3.
        buffers: windows whose rows a group has in shared memory, 1 or 2.
    """

    windows: int
    groups: int = 3
    buffers: int = 1

    def shared_bytes(self, C: int) -> int:
        """Weights and rows of a program, less the vectors and the barrier."""
        return 192 * C + self.groups * self.buffers * 128 * C


@dataclasses.dataclass(frozen=True)
class HopperWholeConfig:
    """The form with proj and residual of compute capability 9.0 (hopper_whole.py).

    Attributes:
        windows: of a program, which fetches all weights once.
        groups: warp groups that share them, each with windows of its own, 1 to 3.
    """

    windows: int
    groups: int = 2

    def shared_bytes(self, C: int) -> int:
        """Weights, vectors, and each group's rows, keys and values, and table, if need be fp32.

        Weights lie in blocks of 128 rows: three of C columns, C / 32 of 32.
        """
        weights = 4 * 128 * C * 2
        return weights + 4 * next_power_of_2(6 * C) + self.groups * (128 * C + 8192 + 16384)


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


def hopper_heads_steps(C: int) -> tuple[int, int]:
    """Steps of 64 channels between two waits for rows, and tiles of rows that find room.

    A wait for each of two steps took 0.1 to 0.3 us more (384 to 768 channels, H200).
    """
    steps = C // 64
    span = 2 if steps % 2 == 0 and steps > 2 else 1
    room = (HOPPER_BYTES - 192 * C) // (64 * 128)
    return span, min(steps, room // span * span)


def hopper_heads_blocker(
    C: int, num_heads: int, window_size: tuple[int, int], map_size: tuple[int, int]
) -> str | None:
    """Reason why the kernel of :class:`HopperHeadsConfig` takes no such half; None where it does.

    Args:
        C, num_heads: channels and heads of the stage.
        window_size, map_size: in tokens.
    """
    if C != 32 * num_heads or C % 64:
        return f"an even number of heads of 32 channels is needed, not {num_heads} in {C}"
    if not MIN_HOPPER_CHANNELS <= C <= MAX_HOPPER_CHANNELS:
        return f"{MIN_HOPPER_CHANNELS} to {MAX_HOPPER_CHANNELS} channels are needed, not {C}"
    other = _hopper_map_blocker(C, window_size, map_size)
    return other or why_no_gluon("fastswin.ops.attention_half.hopper_heads")


def _hopper_map_blocker(
    C: int, window_size: tuple[int, int], map_size: tuple[int, int]
) -> str | None:
    """Reason why no Hopper kernel takes windows of such a map; else None."""
    tokens = window_size[0] * window_size[1]
    if not 49 <= tokens <= MAX_TOKENS:
        return f"windows of 49 to {MAX_TOKENS} tokens are needed, not {tokens}"
    if any(side % window for side, window in zip(map_size, window_size, strict=True)):
        return f"a map of {map_size} is no multiple of a window of {window_size}"
    if map_size[0] * map_size[1] * C >= 2**31:
        return "tokens of one image are addressed in 32 bits"
    return None


def hopper_windows_blocker(
    C: int,
    num_heads: int,
    window_size: tuple[int, int],
    map_size: tuple[int, int],
    config: HopperWindowsConfig | None = None,
) -> str | None:
    """Reason why the kernel of :class:`HopperWindowsConfig` takes no such half; else None.

    Args:
        C, num_heads: channels and heads of the stage.
        window_size, map_size: in tokens.
        config: to be checked, or None.
    """
    if config is None:
        config = HopperWindowsConfig(1, groups=1)
    if config.groups not in WINDOWS_REGISTERS or config.buffers not in (1, 2) or config.windows < 1:
        return f"1 to 3 groups of 1 or 2 buffers are needed, not {config}"
    if C < 128:
        return f"{C} channels are fewer than 128"
    if config.shared_bytes(C) > WINDOWS_BYTES:
        return f"{config.shared_bytes(C)} bytes of weights and rows exceed {WINDOWS_BYTES}"
    other = hopper_heads_blocker(C, num_heads, window_size, map_size)
    return other or why_no_gluon("fastswin.ops.attention_half.hopper_windows")


def default_hopper_windows_config(
    C: int, windows: int, multiprocessors: int
) -> HopperWindowsConfig:
    """Heuristic: one program a multiprocessor, as many groups as have windows and room.

    Args:
        C: channels, 32 a head.
        windows: of the batch.
        multiprocessors: of the GPU.
    """
    share = cdiv(windows, max(1, multiprocessors // (C // 32)))
    groups, buffers = 1, 1
    for many in (2, 3):
        if many <= share and HopperWindowsConfig(share, many).shared_bytes(C) <= WINDOWS_BYTES:
            groups = many
    if share > groups and HopperWindowsConfig(share, groups, 2).shared_bytes(C) <= WINDOWS_BYTES:
        buffers = 2
    return HopperWindowsConfig(share, groups, buffers)


def hopper_whole_blocker(
    C: int,
    num_heads: int,
    window_size: tuple[int, int],
    map_size: tuple[int, int],
    config: HopperWholeConfig | None = None,
) -> str | None:
    """Reason why the kernel of :class:`HopperWholeConfig` takes no such half; else None.

    Args:
        C, num_heads: channels and heads of the stage.
        window_size, map_size: in tokens.
        config: to be checked, or None.
    """
    if config is None:
        config = HopperWholeConfig(1, groups=1)
    if config.groups not in WINDOWS_REGISTERS or config.windows < 1:
        return f"1 to 3 groups of windows are needed, not {config}"
    if C not in HOPPER_WHOLE_WIDTH or C != 32 * num_heads:
        return f"3 or 4 heads of 32 channels are needed, not {num_heads} in {C}"
    if config.shared_bytes(C) > WINDOWS_BYTES:
        return f"{config.shared_bytes(C)} bytes of weights and rows exceed {WINDOWS_BYTES}"
    other = _hopper_map_blocker(C, window_size, map_size)
    return other or why_no_gluon("fastswin.ops.attention_half.hopper_whole")


def default_hopper_whole_config(C: int, windows: int, multiprocessors: int) -> HopperWholeConfig:
    """Heuristic: one program a multiprocessor, of two groups where there are two windows.

    Three, of 168 registers a thread, took 3.5 % of Swin-T longer at batch 32 (H200).

    Args:
        C: channels, 32 a head.
        windows: of the batch.
        multiprocessors: of the GPU.
    """
    share = max(1, cdiv(windows, multiprocessors))
    return HopperWholeConfig(share, min(share, 2))


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
