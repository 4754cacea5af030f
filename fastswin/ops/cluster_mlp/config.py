"""Tiles of the MLP in clusters, and what it needs of the card and of shapes; imports no Triton.

``M`` rows of ``C`` channels, ``H = 4 C`` hidden units. Shared memory of a program, in bytes:

    slots * 16384               ring of weight tiles, 128 rows of 64 halves
    2 * block_m * C             its rows of x, in whose place the sums of others come later
    8 * H / programs            sums of fc1's rows and its bias
    2 * C                       what is added to x, where its writer has left that to its readers
    16 * tiles + 416            barriers, alignment, what the compiler keeps for its partitions
"""

from __future__ import annotations

import dataclasses

import torch

from fastswin._triton.available import why_no_gluon
from fastswin._triton.cluster import why_no_clusters
from fastswin._triton.device import device_capability
from fastswin._triton.tiles import cdiv

#: Rows and halves of a weight tile: one copy.
TILE_ROWS, TILE_COLUMNS = 128, 64

#: Bytes of a weight tile.
TILE_BYTES = 2 * TILE_ROWS * TILE_COLUMNS

#: Bytes that a program may have at compute capability 9.0.
MAX_SHARED_BYTES = 227 * 1024

#: Bytes of a tile's barrier, as the compiler aligns it, and of what it keeps for its partitions.
READY_BYTES, SPARE_BYTES = 16, 32

#: Bytes of the tail before x: barriers, one for each 128 columns, three more and one for each slot
#: of the ring; and what aligning it may cost.
TAIL_BARRIERS, TAIL_ALIGNMENT = 256, 128

#: Hidden units that a program may have: more fill its registers.
HIDDEN = (128, 192, 256)

#: Programs of a cluster.
PROGRAMS = (4, 8, 16)

#: Fewest channels: fc1's steps of fewer end before GELU that stands beside them.
MIN_CHANNELS = 256


@dataclasses.dataclass(frozen=True)
class ClusterMlpConfig:
    """Launch options.

    Attributes:
        block_m: rows of a cluster, 64 or 128.
        programs: programs of a cluster, each with its part of the hidden units: 4, 8 or 16.
    """

    block_m: int = 128
    programs: int = 8

    @property
    def warps(self) -> int:
        """Of a program: one for 16 rows."""
        return self.block_m // 16

    @property
    def rows(self) -> int:
        """Rows that each program adds up and stores."""
        return self.block_m // self.programs

    def hidden(self, C: int) -> int:
        """Hidden units of a program."""
        return 4 * C // self.programs

    def tiles(self, C: int) -> int:
        """Weight tiles of a program, of both products."""
        return 2 * self.hidden(C) * C // (TILE_ROWS * TILE_COLUMNS)

    def tail_bytes(self, C: int, offset: bool = False) -> int:
        """What programs reach by address: barriers, x, later statistics and sums, the offset."""
        x = 2 * self.block_m * C
        return TAIL_BARRIERS + TAIL_ALIGNMENT + x + (2 * C if offset else 0)

    def slots(self, C: int, offset: bool = False) -> int:
        """Weight tiles that the ring holds: all of a program's, or as many as fit."""
        rest = MAX_SHARED_BYTES - self._beside_ring(C, offset)
        return min(self.tiles(C), rest // TILE_BYTES)

    def shared_bytes(self, C: int, offset: bool = False) -> int:
        """Shared memory of a program."""
        return self.slots(C, offset) * TILE_BYTES + self._beside_ring(C, offset)

    def _beside_ring(self, C: int, offset: bool) -> int:
        vectors, barriers = 8 * self.hidden(C), READY_BYTES * self.tiles(C)
        return self.tail_bytes(C, offset) + vectors + barriers + SPARE_BYTES


#: Fastest tiles by channels, for rows up to a number (H200, docs/performance.md).
MEASURED: dict[int, tuple[tuple[int, ClusterMlpConfig], ...]] = {
    384: ((800, ClusterMlpConfig(64, 8)), (1664, ClusterMlpConfig(128, 8))),
    512: ((800, ClusterMlpConfig(64, 8)), (1664, ClusterMlpConfig(128, 8))),
    768: ((448, ClusterMlpConfig(64, 16)),),
}


def default_cluster_mlp_config(M: int, C: int) -> ClusterMlpConfig | None:
    """Tiles of a shape; None where separate launches are expected to be faster."""
    for rows, config in MEASURED.get(C, ()):
        if rows >= M:
            return config
    return None


def config_blocker(config: ClusterMlpConfig, M: int, C: int, H: int) -> str | None:
    """Reason why the kernel does not take an MLP, None where it does."""
    if config.block_m not in (64, 128):
        return f"clusters have 64 or 128 rows, not {config.block_m}"
    if config.programs not in PROGRAMS:
        return f"4, 8 or 16 programs share the hidden units, not {config.programs}"
    if H != 4 * C:
        return f"4 times as many hidden units as channels are needed, not {H} of {C}"
    if C % TILE_ROWS or C < MIN_CHANNELS:
        return f"a multiple of {TILE_ROWS} channels from {MIN_CHANNELS} on is needed, not {C}"
    if H % config.programs or config.hidden(C) not in HIDDEN:
        units = " or ".join(map(str, HIDDEN))
        return f"a program has {units} hidden units, not {H} / {config.programs}"
    if config.slots(C) < 4:
        return f"{config} leaves room for {config.slots(C)} weight tiles of {C} channels, not 4"
    if cdiv(M, config.block_m) * config.block_m * C >= 2**31:
        return "values are addressed in 32 bits"
    return None


def why_no_cluster_mlp(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why a device cannot run the kernel, None where it can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"MLPs in clusters are half precision, not {dtype}"
    return why_no_clusters(device.type, device_capability(device)) or why_no_gluon(
        "fastswin.ops.cluster_mlp.kernel"
    )
