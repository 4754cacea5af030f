"""Tile sizes of the fused 8-bit MLP and where it applies."""

from __future__ import annotations

import dataclasses

from fastswin._triton.tiles import MIN_DOT_8_BITS, split_columns, why_not_dot

#: Wider rows are faster as two 8-bit GEMMs: at 256 channels 51.8 us against 58.2 (H100, M 25088).
MAX_CHANNELS = 192

MIN_PART = MIN_DOT_8_BITS


@dataclasses.dataclass(frozen=True)
class QuantizedMlpConfig:
    """Launch options of the fused 8-bit MLP.

    Attributes:
        block_m: rows per program.
        block_h: hidden units per step.
        num_warps: warps per program.
        num_stages: depth of the weight pipeline over steps.
        tma: weights come through the tensor copy engine (compute capability 9.0 and later).
    """

    block_m: int
    block_h: int
    num_warps: int
    num_stages: int
    tma: bool = False


def config_blocker(config: QuantizedMlpConfig) -> str | None:
    """Reason why no tensor core multiplies these tiles, None where they do."""
    return why_not_dot({"block_m": config.block_m}, {"block_h": config.block_h}, narrow=True)


def default_quantized_mlp_config(C: int, capability: tuple[int, int]) -> QuantizedMlpConfig:
    """Heuristic: the best of seven on an H200 (docs/performance.md), 64 x 128 and 64 x 64."""
    if capability[0] in (9, 10):
        return QuantizedMlpConfig(64, 128 if C > 96 else 64, num_warps=4, num_stages=2, tma=True)
    return QuantizedMlpConfig(64 if C <= 128 else 32, 64, num_warps=4, num_stages=2)


def quantized_mlp_blocker(C: int, hidden: int, block_h: int = 128) -> str | None:
    """Reason why one kernel cannot hold this MLP, None where it can."""
    if C > MAX_CHANNELS:
        return f"{C} channels exceed {MAX_CHANNELS}"
    columns = split_columns(C)
    if columns is None or min(c for c in columns if c) < MIN_PART:
        return f"{C} channels are not one or two powers of two of at least {MIN_PART}"
    if hidden % block_h:
        return f"{hidden} hidden channels are not a multiple of {block_h}"
    return None
