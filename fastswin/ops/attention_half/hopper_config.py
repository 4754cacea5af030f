"""Hopper's forms of the attention half: their tiles, and which stages they take; imports no Triton.

Numbers behind the choices: docs/performance.md.
"""

from __future__ import annotations

import dataclasses

from fastswin._triton.available import why_no_gluon
from fastswin._triton.tiles import cdiv, next_power_of_2
from fastswin.ops.attention_half.config import MAX_TOKENS
from fastswin.ops.window_attention.hopper_config import map_blocker

#: Fewest and most channels of :class:`HopperHeadsConfig`: two tiles of rows, and weights that leave
#: room for most of the rows' tiles (192 bytes a channel of weights, 128 of rows).
MIN_HOPPER_CHANNELS, MAX_HOPPER_CHANNELS = 128, 768

#: Bytes of shared memory that weights and rows of a program may take, less than the 227 KiB of
#: compute capability 9.0 by what vectors, barriers and alignment do.
HOPPER_BYTES = 226 * 1024

#: Registers that the compiler leaves a thread of all its groups but the first, by groups.
WINDOWS_REGISTERS = {1: 0, 2: 240, 3: 168}

#: Columns of a tile of :class:`HopperWholeConfig` by channels, a power of two that divides them;
#: weights of a half of more channels leave no room.
HOPPER_WHOLE_WIDTH = {96: 32, 128: 64}


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
    return map_blocker(C, window_size, map_size)


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
    if config.shared_bytes(C) > HOPPER_BYTES:
        return f"{config.shared_bytes(C)} bytes of weights and rows exceed {HOPPER_BYTES}"
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
        if many <= share and HopperWindowsConfig(share, many).shared_bytes(C) <= HOPPER_BYTES:
            groups = many
    if share > groups and HopperWindowsConfig(share, groups, 2).shared_bytes(C) <= HOPPER_BYTES:
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
    if config.shared_bytes(C) > HOPPER_BYTES:
        return f"{config.shared_bytes(C)} bytes of weights and rows exceed {HOPPER_BYTES}"
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
