"""Tiles of the streamed MLP and what it needs; imports no Triton.

``M`` rows of ``C`` channels, ``H`` hidden units. Shared memory of a program, in bytes:

    slots * 128 * C             ring of weight chunks, 64 hidden units of fc1 or of fc2
    groups * 128 * C            rows, 64 of each warp group
    4 * values                  biases and V2's norm, to a power of two
    128 * C + 384               of two programs: barrier, sums of the other's rows
    32 * (slots + groups)       barriers; some more for the compiler's partitions
"""

from __future__ import annotations

import dataclasses

import torch

from fastswin._triton.available import why_no_gluon
from fastswin._triton.cluster import why_no_clusters
from fastswin._triton.device import device_capability
from fastswin._triton.tiles import cdiv, next_power_of_2

#: Hidden units of a chunk, rows of a warp group, and columns that tiles of both have.
STEP = 64

#: Channels of a row that the kernel takes, with the most warp groups whose sums registers hold.
MOST_GROUPS = {128: 3, 192: 3, 256: 2}

#: Bytes that a program may have at compute capability 9.0.
MAX_SHARED_BYTES = 227 * 1024

#: Registers of a thread of a warp group, by groups, and of those that ask for chunks.
REGISTERS = {2: 240, 3: 160}
LOADER_REGISTERS = 24

#: Bytes of barriers, and of what the compiler keeps for its partitions.
BARRIER_BYTES, SPARE_BYTES = 16, 64

#: Bytes of a tail before sums: its barrier, aligned; and what aligning the tail may cost.
TAIL_BARRIER, TAIL_ALIGNMENT = 256, 128

#: Fewest chunks that a ring may hold: two are multiplied while two come.
MIN_SLOTS = 4


@dataclasses.dataclass(frozen=True)
class StreamedMlpConfig:
    """Launch options.

    Attributes:
        groups: warp groups of a program, each with 64 rows of its own: 2 or 3.
        programs: 2 share the hidden units of the same rows, as a cluster, each of two groups.
        together: whether fc1 of a step is started with fc2 of the step before, 0 or 1; three groups
            of 192 channels have no registers for both.
        order: 0 for groups that start products whenever they can; for groups that do so in turn,
            such that one's products run beside the others' GELU, 1 where the next may when they are
            started, 2 where it may when they are done.
    """

    groups: int = 3
    programs: int = 1
    together: int = 0
    order: int = 0

    @property
    def rows(self) -> int:
        """Rows of a program, or of a cluster."""
        return self.groups * STEP

    def steps(self, H: int) -> int:
        """Steps of 64 hidden units of a program."""
        return H // (STEP * self.programs)

    def values(self, C: int, H: int, post_norm: bool) -> int:
        """fp32 values of a program's vectors: fc1's biases, fc2's, V2's norm."""
        return H // self.programs + (3 if post_norm else 1) * C

    def tail_bytes(self, C: int) -> int:
        """What two programs reach by address in each other: a barrier, sums of 64 rows."""
        return 0 if self.programs == 1 else TAIL_BARRIER + TAIL_ALIGNMENT + 2 * STEP * C

    def slots(self, C: int, H: int, post_norm: bool) -> int:
        """Chunks that the ring holds: all, or as many as fit."""
        beside = 2 * self.rows * C + 4 * next_power_of_2(self.values(C, H, post_norm))
        beside += self.tail_bytes(C) + SPARE_BYTES + BARRIER_BYTES * 2 * self.groups
        room = MAX_SHARED_BYTES - beside
        return min(2 * self.steps(H), room // (2 * STEP * C + 2 * BARRIER_BYTES))


#: Time of a round of programs by tiles, us of an H200 for each channel count: what chooses between
#: them, within 5 % of eight sizes of 192 channels (docs/performance.md).
ROUND_US: dict[int, dict[StreamedMlpConfig, float]] = {
    128: {
        StreamedMlpConfig(3, 1, 1): 15.3,
        StreamedMlpConfig(2, 1, 1): 11.6,
        StreamedMlpConfig(2, 2, 1): 9.2,
    },
    192: {
        StreamedMlpConfig(3): 26.5,
        StreamedMlpConfig(2, 1, 1): 19.5,
        StreamedMlpConfig(2, 2, 1): 13.1,
    },
    256: {StreamedMlpConfig(2, 1, 1): 30.0},
}


def default_streamed_mlp_config(M: int, C: int, multiprocessors: int) -> StreamedMlpConfig | None:
    """Tiles whose rounds of programs take least; None for channels that the kernel lacks."""
    if C not in ROUND_US:
        return None

    def microseconds(config: StreamedMlpConfig) -> float:
        programs = cdiv(M, config.rows) * config.programs
        return cdiv(programs, multiprocessors) * ROUND_US[C][config]

    return min(ROUND_US[C], key=microseconds)


def config_blocker(config: StreamedMlpConfig, M: int, C: int, H: int) -> str | None:
    """Reason why the kernel does not take an MLP, None where it does."""
    if config.groups not in REGISTERS:
        return f"groups must be 2 or 3, got {config.groups}"
    if config.programs not in (1, 2):
        return f"programs must be 1 or 2, got {config.programs}"
    if config.together not in (0, 1):
        return f"together must be 0 or 1, got {config.together}"
    if config.order not in (0, 1, 2):
        return f"order must be 0, 1 or 2, got {config.order}"
    if config.programs == 2 and config.groups != 2:
        return f"two programs have two groups each, whose sums they exchange, not {config.groups}"
    if C not in MOST_GROUPS:
        return f"rows must have {', '.join(map(str, MOST_GROUPS))} channels, got {C}"
    if config.groups > MOST_GROUPS[C]:
        return f"registers hold the sums of {MOST_GROUPS[C]} groups of {C} channels"
    if H % (STEP * config.programs) or H < 2 * STEP * config.programs:
        return f"hidden units come in steps of {STEP * config.programs}, at least two, got {H}"
    if (slots := config.slots(C, H, True)) < MIN_SLOTS:
        return f"{config} leaves room for {slots} chunks of {C} channels, not {MIN_SLOTS}"
    if cdiv(M, config.rows) * config.rows * C >= 2**31:
        return "values are addressed in 32 bits"
    return None


def why_no_streamed_mlp(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why a device cannot run the kernel, None where it can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"streamed MLPs are half precision, not {dtype}"
    return why_no_clusters(device.type, device_capability(device)) or why_no_gluon(
        "fastswin.ops.streamed_mlp.kernel"
    )
