"""Tiles of the streamed MLP and what it needs; imports no Triton.

``M`` rows of ``C`` channels, ``H`` hidden units. Shared memory of a program, in bytes:

    slots * 128 * C             ring of weight chunks, 64 hidden units of fc1 or of fc2
    groups * 128 * C            rows, 64 of each warp group
    4 (H / programs + 3 C)      biases and V2's norm, each to a power of two
    128 * C + 384               of two programs: barrier, sums of the other's rows
    16 * (2 slots + groups)     barriers; some more for the compiler's partitions
"""

from __future__ import annotations

import dataclasses

import torch

from fastswin._triton.available import why_no_gluon
from fastswin._triton.cluster import why_no_clusters
from fastswin._triton.device import device_capability, multiprocessor_count
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
BARRIER_BYTES, SPARE_BYTES = 16, 192

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
    """

    groups: int = 3
    programs: int = 1

    @property
    def rows(self) -> int:
        """Rows of a program, or of a cluster."""
        return self.groups * STEP

    def steps(self, H: int) -> int:
        """Steps of 64 hidden units of a program."""
        return H // (STEP * self.programs)

    def held(self, C: int) -> bool:
        """Whether groups hold their rows in registers, as first operands."""
        return self.groups == 2 and C <= 192

    def together(self, C: int) -> bool:
        """Whether fc1 of a step is started with fc2 of the step before: registers hold both."""
        return self.groups == 2 or C == 128

    def vector_bytes(self, C: int, H: int, post_norm: bool) -> int:
        """A program's vectors: fc1's biases, fc2's, V2's norm."""
        values = next_power_of_2(H // self.programs)
        return 4 * (values + (3 if post_norm else 1) * next_power_of_2(C))

    def tail_bytes(self, C: int) -> int:
        """What two programs reach by address in each other: a barrier, sums of 64 rows."""
        return 0 if self.programs == 1 else TAIL_BARRIER + TAIL_ALIGNMENT + 2 * STEP * C

    def slots(self, C: int, H: int, post_norm: bool) -> int:
        """Chunks that the ring holds: all, or as many as fit."""
        room = MAX_SHARED_BYTES - self._beside_ring(C, H, post_norm)
        return min(2 * self.steps(H), room // (2 * STEP * C + 2 * BARRIER_BYTES))

    def shared_bytes(self, C: int, H: int, post_norm: bool) -> int:
        """Shared memory of a program."""
        ring = self.slots(C, H, post_norm) * (2 * STEP * C + 2 * BARRIER_BYTES)
        return ring + self._beside_ring(C, H, post_norm)

    def _beside_ring(self, C: int, H: int, post_norm: bool) -> int:
        rows = 2 * self.rows * C
        barriers = SPARE_BYTES + BARRIER_BYTES * self.groups
        return rows + self.vector_bytes(C, H, post_norm) + self.tail_bytes(C) + barriers


#: Time of a round of programs by tiles, us of an H200 for each channel count: what chooses between
#: them, within 6 % of six sizes of 192 channels (docs/performance.md).
ROUND_US: dict[int, dict[StreamedMlpConfig, float]] = {
    128: {
        StreamedMlpConfig(3): 16.2,
        StreamedMlpConfig(2): 11.9,
        StreamedMlpConfig(2, 2): 9.5,
    },
    192: {
        StreamedMlpConfig(3): 28.0,
        StreamedMlpConfig(2): 20.7,
        StreamedMlpConfig(2, 2): 14.0,
    },
    256: {StreamedMlpConfig(2): 30.5},
}

#: Share of the multiprocessors that rounds of programs keep at work at least: at 0.74 Swin-B at 32
#: gains 2 % by 256 channels, at 0.37 Swin-B at 8 loses 2.7.
BUSY = 0.7


def default_streamed_mlp_config(
    M: int, hidden: int, C: int, multiprocessors: int
) -> StreamedMlpConfig | None:
    """Tiles whose rounds of programs take least, None where they leave too much of a card idle."""
    fitting = [c for c in ROUND_US.get(C, ()) if config_blocker(c, M, C, hidden) is None]
    if not fitting:
        return None

    def programs(config: StreamedMlpConfig) -> int:
        return cdiv(M, config.rows) * config.programs

    def rounds(config: StreamedMlpConfig) -> int:
        return cdiv(programs(config), multiprocessors)

    best = min(fitting, key=lambda config: rounds(config) * ROUND_US[C][config])
    return best if programs(best) >= BUSY * rounds(best) * multiprocessors else None


def chosen_streamed_mlp(
    M: int, hidden: int, C: int, dtype: torch.dtype, device: torch.device
) -> StreamedMlpConfig | None:
    """:func:`default_streamed_mlp_config` of the GPU at hand, None on any other."""
    if why_no_streamed_mlp(device, dtype) is not None:
        return None
    return default_streamed_mlp_config(M, hidden, C, multiprocessor_count(device))


def config_blocker(config: StreamedMlpConfig, M: int, C: int, H: int) -> str | None:
    """Reason why the kernel does not take an MLP, None where it does."""
    if config.groups not in REGISTERS:
        return f"groups must be 2 or 3, got {config.groups}"
    if config.programs not in (1, 2):
        return f"programs must be 1 or 2, got {config.programs}"
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
    return why_no_clusters(device.type, device_capability(device)) or gluon_blocker()


def gluon_blocker() -> str | None:
    """Reason why the installed Triton lacks Gluon for this kernel, None where it has it."""
    return why_no_gluon("fastswin.ops.streamed_mlp.kernel")
