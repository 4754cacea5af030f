"""Tiles of a whole block in one kernel, and where it can run. Numbers: docs/performance.md."""

from __future__ import annotations

import dataclasses

from fastswin.ops.attention_half.config import WholeWindowConfig, attention_half_blocker

#: Both halves keep 64 rows of fp32 sums; of 192 channels those and the hidden units do not fit.
MAX_CHANNELS = 128


@dataclasses.dataclass(frozen=True)
class SwinBlockConfig:
    """Launch options of a whole block; one program per window.

    Attributes:
        block_h: hidden units of the MLP per step.
        num_warps: warps per program.
        num_stages: depth of the weight pipelines, over heads and over hidden units, at least 2.
        tma: weights come through the tensor copy engine (compute capability 9.0 and later).
        max_registers: limit per thread, so that more programs share a multiprocessor; 0 sets none.
    """

    block_h: int = 64
    num_warps: int = 4
    num_stages: int = 2
    tma: bool = False
    max_registers: int = 0

    @property
    def attention(self) -> WholeWindowConfig:
        """The options of its attention half."""
        return WholeWindowConfig(self.num_warps, self.num_stages, self.tma, self.max_registers)


def default_swin_block_config(C: int, capability: tuple[int, int]) -> SwinBlockConfig:
    """Heuristic: two stages of weights; on Hopper by the copy engine."""
    if capability[0] in (9, 10):
        return SwinBlockConfig(tma=True)
    return SwinBlockConfig(block_h=32, num_warps=4 if C <= 96 else 8)


def swin_block_blocker(
    C: int,
    num_heads: int,
    tokens: int,
    hidden: int,
    map_elements: int = 0,
    config: SwinBlockConfig | None = None,
) -> str | None:
    """Reason why no kernel holds such a block, None where one does.

    Args:
        C, num_heads: channels and heads of the stage.
        tokens: of one window.
        hidden: units of the MLP.
        map_elements: ``H * W * C``, tokens of one image are addressed in 32 bits.
        config: tiles to be checked, or None.
    """
    if C > MAX_CHANNELS:
        return f"{C} channels exceed {MAX_CHANNELS}"
    step = 64 if config is None else config.block_h
    if step < 16 or step & (step - 1) or hidden % step:
        return f"steps of {step} hidden units must divide {hidden}: a power of two, at least 16"
    attention = None if config is None else config.attention
    return attention_half_blocker(C, num_heads, tokens, True, map_elements, attention)
