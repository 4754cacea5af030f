"""What attention of few long windows on Hopper needs of card and shapes; imports no Triton."""

from __future__ import annotations

import dataclasses

from fastswin._triton.available import why_no_gluon
from fastswin.ops.window_attention.config import key_tiles

Pair = tuple[int, int]

#: Registers that the compiler leaves a thread of all groups but the first.
REGISTERS = 168


@dataclasses.dataclass(frozen=True)
class HopperAttentionConfig:
    """The form of compute capability 9.0 (forward_hopper.py); it has no tiles to choose."""


def hopper_attention_blocker(
    C: int, num_heads: int, window_size: Pair, map_size: Pair
) -> str | None:
    """Reason why the kernel of :class:`HopperAttentionConfig` takes no such windows; else None.

    Args:
        C, num_heads: channels and heads.
        window_size, map_size: in tokens.
    """
    tokens = window_size[0] * window_size[1]
    if C != 32 * num_heads:
        return f"heads of 32 channels are needed, not {num_heads} in {C}"
    if len(key_tiles(tokens)) != 2 or key_tiles(tokens)[0] != 128:
        return f"windows of 129 to 160 tokens are needed, not {tokens}"
    other = map_blocker(3 * C, window_size, map_size)
    return other or why_no_gluon("fastswin.ops.window_attention.forward_hopper")


def map_blocker(channels: int, window_size: Pair, map_size: Pair) -> str | None:
    """Reason why no Hopper kernel takes windows of a map of so many channels; else None."""
    if any(side % window for side, window in zip(map_size, window_size, strict=True)):
        return f"a map of {map_size} is no multiple of a window of {window_size}"
    if map_size[0] * map_size[1] * channels >= 2**31:
        return "tokens of one image are addressed in 32 bits"
    return None
