"""How one softmax problem is cut into programs: tile sizes, and the heuristic that picks them."""

from __future__ import annotations

import dataclasses
from typing import Literal

Direction = Literal["forward", "backward"]
Form = Literal["whole", "long", "paired"]

#: Longest row held whole in registers: 64 fp32 values in each of 512 threads; the backward, with
#: two tensors, would spill there.
MAX_WHOLE_ROW: dict[Direction, int] = {"forward": 32768, "backward": 16384}

#: Longest causal row held whole; longer ones skip dead chunks in the two-pass kernel.
MAX_WHOLE_PREFIX = 4096

#: Longest row that the paired form takes: its length is compiled in.
MAX_PAIRED_ROW = 255

#: fp32 values of one tensor's rows that a thread holds at most.
MAX_VALUES_PER_THREAD = 64

#: Unrolled chunk variants of a causal row; past it the rows go through the two-pass kernel.
MAX_PREFIX_CHUNKS = 8

#: Loop positions per forward program: with more, the last programs leave the card idle; bias and
#: mask are read once for so many rows.
FORWARD_STEPS = 8
PAIRED_FORWARD_STEPS = 4

#: Programs per multiprocessor below which a run along the loop axis is cut shorter.
PROGRAMS_PER_MULTIPROCESSOR = 16

WARP = 32


@dataclasses.dataclass(frozen=True)
class SoftmaxConfig:
    """Launch options.

    Attributes:
        block_rows: rows per program; 1 in the two-pass form.
        block_keys: keys per chunk; a row takes ``ceil(N / block_keys)`` chunks.
        num_warps: warps per program.
        steps: most loop positions per program; 0 takes as many as still fill the GPU.
        long: two passes over the row instead of holding it whole.
        paired: two rows of odd length at a time, ``block_keys`` in words of two elements.
        ahead: the next loop position is loaded before this one's arithmetic; paired form.
        kept: chunks that stay in registers between the two passes.
        programs_per_multiprocessor: most programs of a launch, each taking a run of the loop axis;
            0 takes 16. The two-pass form has one per row.
    """

    block_rows: int
    block_keys: int
    num_warps: int
    steps: int = 0
    long: bool = False
    kept: int = 0
    paired: bool = False
    ahead: bool = False
    programs_per_multiprocessor: int = 0

    @property
    def form(self) -> Form:
        """Which kernel runs it."""
        return "long" if self.long else "paired" if self.paired else "whole"


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def default_config(
    keys: int, vector: int, itemsize: int, direction: Direction, prefix: bool, looped: bool
) -> SoftmaxConfig:
    """Heuristic from measurements on an H100 (docs/masked_softmax.md).

    Args:
        keys: N.
        vector: elements that one load can take: 16 bytes where rows are aligned, else fewer.
        itemsize: bytes per element.
        direction: the backward holds two tensors per row.
        prefix: causal or seq_lens, compiled once per count of live chunks.
        looped: bias, mask or sums of ds stay in registers beside the row.
    """
    tensors = (2 if direction == "backward" else 1) + (1 if looped else 0)
    budget = MAX_VALUES_PER_THREAD if tensors == 1 else MAX_VALUES_PER_THREAD // 2
    if is_long(keys, direction, prefix):
        return long_config(keys, vector, itemsize, direction)
    if keys <= budget * WARP:
        steps = FORWARD_STEPS if looped and direction == "forward" else 0
        return _rows_per_warp(keys, vector, budget, prefix, steps)
    # one row over several warps, as many chunks as a thread has vectors: a chunk wider than that
    # would give bias and mask another layout than x
    warps = min(16, next_power_of_2(-(-keys // (budget * WARP))))
    block = WARP * warps * vector
    while vector < 4 and -(-keys // block) > MAX_PREFIX_CHUNKS:
        block *= 2
    return SoftmaxConfig(1, block, warps)


def is_long(keys: int, direction: Direction, prefix: bool) -> bool:
    """Whether rows go through the two-pass kernel."""
    return keys > (MAX_WHOLE_PREFIX if prefix else MAX_WHOLE_ROW[direction])


def _rows_per_warp(keys: int, vector: int, budget: int, prefix: bool, steps: int) -> SoftmaxConfig:
    """Short rows: a few lanes per row, as few as the register budget allows."""
    if prefix or keys > 256:
        # a whole warp per row, one warp per program: reductions never leave the warp
        block = WARP * vector
        while prefix and -(-keys // block) > MAX_PREFIX_CHUNKS // 2:
            block *= 2
        rows = 1
        while rows < 16 and 2 * rows * -(-keys // block) * block <= budget * WARP:
            rows *= 2
        return SoftmaxConfig(rows, block, 1, steps)
    lanes = 2
    while lanes < WARP and -(-keys // (lanes * vector)) * vector > budget:
        lanes *= 2
    if vector == 1:  # 8 lanes read 16 contiguous bytes of fp16; fewer would waste sectors
        lanes = max(lanes, min(8, next_power_of_2(keys)))
    block = lanes * vector
    values = -(-keys // block) * vector
    rows_per_thread = 1
    while rows_per_thread < 8 and 2 * rows_per_thread * values <= budget:
        rows_per_thread *= 2
    return SoftmaxConfig(max(1, 2 * WARP // lanes) * rows_per_thread, block, 2, steps)


def paired_config(keys: int, direction: Direction) -> SoftmaxConfig:
    """Two rows at a time, one pair per thread, at least a sector of 32 bytes of each pair at once.

    Two pairs per thread hold twice the registers and took 0.24 instead of 0.17 ms (H100,
    [12288, 4, 49, 49]). One warp per program: with two, Triton 3.6 sends each row's sums through
    shared memory. The backward loads a position ahead over 16 lanes a pair: on an H200, whose
    memory wants more loads under way than an H100's, 82 instead of 79 % of the copy rate, 76
    instead of 72 at [4096, 3, 49, 49].
    """
    lanes = 8
    while lanes < WARP and -(-keys // lanes) > 8:
        lanes *= 2
    rows = 2 * WARP // lanes
    if direction == "forward":
        return SoftmaxConfig(rows, lanes, 1, PAIRED_FORWARD_STEPS, paired=True)
    lanes = min(WARP, 2 * lanes)
    return SoftmaxConfig(
        2 * WARP // lanes, lanes, 1, paired=True, ahead=True, programs_per_multiprocessor=32
    )


def long_config(keys: int, vector: int, itemsize: int, direction: Direction) -> SoftmaxConfig:
    """Two passes; the kept chunks are those that the cache would lose first.

    Forward past 64K keys: 2 x 16,384 fp16 keys kept by 32 warps read at 94 % of the copy rate,
    4 x 8,192 by 16 warps at 74 % (H100, 2,048 rows of 131,072). The backward of 4 x 8,192 by 16
    warps reaches 81 %, fewer rows under way, so that the cache holds what is read twice, 78 %;
    2 x 16,384 keys 85 %, but with spills on sm_80.
    """
    huge = keys > 65536
    warps = 4 if keys <= 8192 else 32 if huge and direction == "forward" else 16
    block = WARP * warps * (16 // itemsize) * 2
    if direction == "backward" and huge:
        kept = 4 if vector * itemsize == 16 else 1  # halves loaded apart take a register each
        return SoftmaxConfig(1, block, warps, long=True, kept=kept)
    if direction == "backward":
        block //= 2
    return SoftmaxConfig(1, block, warps, long=True, kept=min(2 if huge else 4, keys // block))
