"""Tile sizes of the fused MLP and where it applies."""

from __future__ import annotations

import dataclasses

from fastswin._triton.tiles import MIN_DOT, split_columns

#: Wider rows spill the fp32 accumulator and stream megabytes of weights per program: at 384
#: channels two GEMMs are faster (docs/performance.md).
MAX_CHANNELS = 256


@dataclasses.dataclass(frozen=True)
class MlpConfig:
    """Launch options of the fused MLP.

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


def default_mlp_config(C: int, capability: tuple[int, int]) -> MlpConfig:
    """Heuristic from measurements on an H100."""
    if capability < (8, 0):  # no tensor-core code there: operands fill the registers
        return MlpConfig(16, 16, num_warps=4, num_stages=1)
    if capability[0] not in (9, 10):  # 99 to 163 KiB of shared memory
        if C <= 128:
            return MlpConfig(64, 64, num_warps=4, num_stages=2)
        return MlpConfig(64, 32, num_warps=8, num_stages=2)
    if C < 128:
        return MlpConfig(128, 64, num_warps=4, num_stages=2, tma=True)
    if C == 128:
        return MlpConfig(64, 64, num_warps=4, num_stages=3, tma=True)
    if C <= 192:
        return MlpConfig(64, 128, num_warps=4, num_stages=2, tma=True)
    return MlpConfig(64, 64, num_warps=4, num_stages=2, tma=True)


def default_tf32_mlp_config(C: int, capability: tuple[int, int]) -> MlpConfig:
    """Heuristic for fp32 operands: two stages of weights take 512 C bytes a hidden step of 32."""
    if capability[0] not in (9, 10):
        return MlpConfig(64, 32 if C <= 64 else 16, num_warps=4, num_stages=2)
    return MlpConfig(64, 32, num_warps=4, num_stages=2, tma=True)


def mlp_blocker(C: int, hidden: int, block_h: int) -> str | None:
    """Reason why one kernel cannot hold this MLP, None where it can."""
    if C > MAX_CHANNELS:
        return f"{C} channels exceed {MAX_CHANNELS}"
    if split_columns(C) is None:
        return f"{C} channels are not one or two powers of two of at least {MIN_DOT}"
    if hidden % block_h:
        return f"{hidden} hidden channels are not a multiple of {block_h}"
    return None
