"""How one backward is cut into programs. Which form it takes depends on the shape alone."""

from __future__ import annotations

import dataclasses

from fastswin._triton.tiles import next_power_of_2
from fastswin.ops.window_attention.config import padded_tokens

#: Longest window whose scores, their gradient and dbias one program keeps in registers.
MAX_WHOLE_WINDOW = 64

#: Bytes of q, k, v and dO of one window in registers: twice as many spill 400 bytes a thread on
#: sm_80 and sm_86.
MAX_WHOLE_BYTES = 16 * 1024

#: Longest window whose dbias the dkv kernel takes along in registers.
MAX_FUSED_DBIAS = 144

#: Programs of the kernels that walk over windows: two for each of an H100's 132 multiprocessors.
#: A constant, so that the order of every sum does not depend on how many a card has.
WHOLE_PROGRAMS = 264
TILED_PROGRAMS = 1056


@dataclasses.dataclass(frozen=True)
class WholeBackwardConfig:
    """Launch options for windows of up to :data:`MAX_WHOLE_WINDOW` tokens.

    Attributes:
        num_warps: warps per program.
        num_stages: depth of the load pipeline over windows.
        programs: programs at most; each has one head and a run of windows.
        sums_qkv: the sum of dqkv over tokens stays in registers as well, where it is asked for.
            From 9.0 on; before, its 32 registers a thread spill up to 276 bytes.
        by_kind: a run has windows of one kind (backward_runs.py), else of all (backward_whole.py).
        holds_bias: of runs by kind: the bias stays in registers, else each window reads it.
    """

    num_warps: int = 4
    num_stages: int = 3
    programs: int = WHOLE_PROGRAMS
    sums_qkv: bool = True
    by_kind: bool = False
    holds_bias: bool = True


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """One kernel of the tiled form.

    Attributes:
        resident: tokens that a program keeps (dq: queries; dkv: keys; dbias: queries).
        walked: tokens per step of its walk over the others; dbias keeps these too.
        tail: tokens of the last step, 0 where ``walked`` covers everything.
        num_warps, num_stages: as usual.
    """

    resident: int
    walked: int
    tail: int = 0
    num_warps: int = 4
    num_stages: int = 2


@dataclasses.dataclass(frozen=True)
class TiledBackwardConfig:
    """Launch options for longer windows.

    Attributes:
        dq, dkv: tiles of the two kernels.
        dbias: tiles of the third; None lets dkv take dbias along.
        programs: programs at most of the kernels that walk over windows.
    """

    dq: TileConfig
    dkv: TileConfig
    dbias: TileConfig | None
    programs: int = TILED_PROGRAMS


BackwardConfig = WholeBackwardConfig | TiledBackwardConfig


def number_of_runs(programs: int, per_run: int, windows: int) -> int:
    """Runs that the windows are dealt to, ``per_run`` programs each."""
    return max(1, min(windows, programs // per_run))


def exact_tail(tokens: int, walked: int) -> int:
    """Power of two that covers what full steps of ``walked`` leave, 0 where that saves nothing."""
    rest = tokens % walked
    tail = max(16, next_power_of_2(rest)) if rest else 0
    return 0 if tail >= walked else tail


def takes_whole_windows(tokens: int, head_dim: int, itemsize: int) -> bool:
    """Whether the backward needs nothing but its inputs; else the forward saves row statistics."""
    block_d = max(16, next_power_of_2(head_dim))
    if tokens > MAX_WHOLE_WINDOW:
        return False
    return 4 * padded_tokens(tokens) * block_d * itemsize <= MAX_WHOLE_BYTES


def default_backward_config(
    tokens: int,
    head_dim: int,
    itemsize: int,
    capability: tuple[int, int] = (9, 0),
    plain: bool = True,
) -> BackwardConfig:
    """Heuristic from measurements on an H100 and an H200 and from what the compiler reports.

    Args:
        tokens: tokens per window.
        head_dim: channels of a head.
        itemsize: bytes per element of q, k, v.
        capability: of the GPU that runs it.
        plain: V1 without dropout, padding and a mask of the caller's: what runs by kind have
            registers for.
    """
    if capability < (8, 0):  # no tensor-core code there: larger tiles spill kilobytes a thread
        tile = TileConfig(16, 16, num_warps=4, num_stages=1)
        return TiledBackwardConfig(tile, tile, tile)
    if takes_whole_windows(tokens, head_dim, itemsize):
        if capability < (9, 0) or not plain or itemsize == 4:
            return WholeBackwardConfig(sums_qkv=capability >= (9, 0))
        return WholeBackwardConfig(num_stages=4, by_kind=True)
    return _tiled_config(tokens, head_dim, itemsize, capability)


def _tiled_config(
    tokens: int, head_dim: int, itemsize: int, capability: tuple[int, int]
) -> TiledBackwardConfig:
    if itemsize == 4 or head_dim > 64:
        tile = TileConfig(32, 32, exact_tail(tokens, 32), num_warps=4, num_stages=1)
        return TiledBackwardConfig(tile, tile, tile)
    # us on an H200, 8,192 windows and heads of 144, 1,536 of 256, 512 of 576: dq 374, 159, 226 (64
    # keys and 2 stages 552, 214, 288), dkv with dbias 451, without 243 and 385, dbias 129 and 227
    dq = TileConfig(64, 32, exact_tail(tokens, 32), num_warps=4, num_stages=3)
    if tokens <= MAX_FUSED_DBIAS:
        dkv = TileConfig(16, 64, exact_tail(tokens, 64), num_warps=2, num_stages=2)
        return TiledBackwardConfig(dq, dkv, None)
    # three stages of q, k, v, dO, bias and mask exceed what smaller cards have
    stages = 3 if capability[0] in (9, 10) else 2
    return TiledBackwardConfig(dq, dq, TileConfig(64, 64, num_warps=4, num_stages=stages))
