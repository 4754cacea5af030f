"""Tiles of the product in clusters, and what it needs of the card and of shapes; imports no Triton.

``M`` rows, ``N`` output and ``K`` input channels. Shared memory of a program, in bytes:

    slots * (block_m + block_n) * block_k * 2       ring of operand tiles, in whole larger ones
    splits > 1: block_m * block_n * 4       sums of its rows from all programs of its tile
    post-norm: N / block_n * block_m / splits * 8       statistics of its rows from all tiles
    128 and 16 + 8 * slots                  alignment, barriers
"""

from __future__ import annotations

import dataclasses

import torch

from fastswin._triton.available import why_no_gluon
from fastswin._triton.cluster import why_no_clusters
from fastswin._triton.device import device_capability
from fastswin._triton.tensor_copy import COPY_BYTES
from fastswin._triton.tiles import cdiv

#: Channels of K in the narrowest step: a row of shared memory that is swizzled whole, in half
#: precision. A copy of so many takes its warp 75 ns to ask for (H200), however few its rows; of a
#: step of 128 or 256 channels as many warps ask for a part each.
BLOCK_K = 64

#: Rows of a tile below which the weight is the product's first operand, whose lines tensor cores
#: take by 64.
NARROW = 64

#: Bytes that a program may have at compute capability 9.0.
MAX_SHARED_BYTES = 227 * 1024

#: Most programs of a cluster.
MAX_PROGRAMS = 16


@dataclasses.dataclass(frozen=True)
class ClusterLinearConfig:
    """Launch options.

    Attributes:
        block_m: rows of a tile: 64 or 128, or 16 or 32 with the operands in the other order.
        block_n: columns of a tile, 64 or 128.
        splits: programs of a cluster, which share one tile's K: 1, 2, 4 or 8.
        slots: operand tiles in the ring; a program that has as many as steps loads all at once.
        block_k: channels of K in one step, 64, 128 or 256.
        share_rows: tiles of rows of a cluster, which share what is copied of the weight.
        share_columns: tiles of columns of a cluster, which share what is copied of x.
    """

    block_m: int
    block_n: int
    splits: int
    slots: int
    block_k: int = BLOCK_K
    share_rows: int = 1
    share_columns: int = 1

    @property
    def narrow(self) -> bool:
        """Whether the weight is the first operand."""
        return self.block_m < NARROW

    @property
    def warps_across(self) -> int:
        """Warps side by side: two where what stands behind the product is the tile's to finish."""
        return 2 if (self.block_m, self.block_n, self.splits) == (64, 128, 1) else 1

    @property
    def warps(self) -> int:
        """Of a program: one for 16 lines of the first operand, and side by side."""
        return (self.block_n if self.narrow else self.block_m) // 16 * self.warps_across

    def steps(self, K: int) -> int:
        """Steps that each program multiplies."""
        return K // (self.block_k * self.splits)

    def early(self, K: int) -> int:
        """Steps whose part of the weight is asked for before the kernel in front has ended.

        All where the ring holds all. Where slots are filled again programs fill a multiprocessor
        and so begin when others end: x's first tile would queue behind all of the weight's, which
        cost Swin-L at 384 pixels 2 % (H200).
        """
        return self.slots if self.slots == self.steps(K) else (self.slots + 1) // 2

    def columns(self, N: int, post_norm: bool) -> int:
        """Tiles of columns of a cluster: with a post-norm all of a row."""
        return N // self.block_n if post_norm else self.share_columns

    def programs(self, N: int, post_norm: bool) -> int:
        """Programs of a cluster."""
        return self.splits * self.share_rows * self.columns(N, post_norm)

    @property
    def head_bytes(self) -> int:
        """Barriers: of sums, of statistics, of the ring's slots."""
        return (16 + 8 * self.slots + 127) // 128 * 128

    def tail_bytes(self, N: int = 0, post_norm: bool = False) -> int:
        """What lies behind the ring: barriers, sums, statistics; 128 to align it."""
        sums = 4 * self.block_m * self.block_n if self.splits > 1 else 0
        statistics = 8 * self.block_m // self.splits * (N // self.block_n) if post_norm else 0
        return self.head_bytes + 128 + sums + statistics

    @property
    def ring_bytes(self) -> int:
        """Of all operand tiles, as many as the larger operand's divide."""
        large = 128 * max(self.block_m, self.block_n)
        needed = self.slots * 2 * self.block_k * (self.block_m + self.block_n)
        return cdiv(needed, large) * large

    def shared_bytes(self, N: int = 0, post_norm: bool = False) -> int:
        """Shared memory of a program."""
        return self.ring_bytes + self.tail_bytes(N, post_norm)


def ring_slots(
    block_m: int,
    block_n: int,
    splits: int,
    K: int,
    N: int = 0,
    post_norm: bool = False,
    block_k: int = BLOCK_K,
) -> int:
    """As many slots as a program has steps, or as fit."""
    steps = ClusterLinearConfig(block_m, block_n, splits, 0, block_k).steps(K)
    for slots in range(steps, 0, -1):
        ring = ClusterLinearConfig(block_m, block_n, splits, slots, block_k)
        if ring.shared_bytes(N, post_norm) <= MAX_SHARED_BYTES:
            return slots
    return 0


def config_blocker(
    config: ClusterLinearConfig, M: int, N: int, K: int, post_norm: bool = False
) -> str | None:
    """Reason why the kernel does not take a product, None where it does."""
    if config.block_m not in (16, 32, 64, 128) or config.block_n not in (64, 128):
        return f"tiles of 16, 32, 64 or 128 rows and 64 or 128 columns are needed, not {config}"
    if config.splits not in (1, 2, 4, 8) or config.block_k not in (64, 128, 256):
        return f"1, 2, 4 or 8 splits and steps of 64, 128 or 256 channels are needed, not {config}"
    if config.narrow and config.block_m // config.splits < 8:
        return f"each of {config.splits} programs adds 8 of {config.block_m} rows or more"
    if config.narrow and post_norm:
        return f"a post-norm needs tiles of {NARROW} rows or more, not {config.block_m}"
    if N % config.block_n or not N:
        return f"{N} columns are no multiple of block_n={config.block_n}"
    shared = config.shared_bytes(N, post_norm)
    if shared > MAX_SHARED_BYTES:
        return f"{config} takes {shared} of {MAX_SHARED_BYTES} bytes"
    columns = N // config.block_n
    if min(config.share_rows, config.share_columns) < 1 or columns % config.share_columns:
        return f"tiles of 1 row or more, and of a divisor of {columns} columns, share: {config}"
    if post_norm and (config.share_rows > 1 or config.share_columns not in (1, columns)):
        return f"with a post-norm all {columns} tiles of a row share x, or none, not {config}"
    if config.programs(N, post_norm) > MAX_PROGRAMS:
        return f"a cluster of {config.programs(N, post_norm)} programs, of {MAX_PROGRAMS} at most"
    if not K or K % (config.block_k * config.splits):
        return f"{K} input channels are no multiple of {config.splits} times {config.block_k}"
    if config.slots != config.steps(K) and not 2 <= config.slots < config.steps(K):
        return f"a ring for {config.steps(K)} steps has two slots to as many, not {config.slots}"
    if cdiv(M, config.block_m) * config.block_m * max(N, K) >= 2**31:
        return "values are addressed in 32 bits"
    return None


def why_no_cluster_linear(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why a device cannot run the kernel, None where it can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"products in clusters are half precision, not {dtype}"
    return why_no_clusters(device.type, device_capability(device)) or gluon_blocker()


def why_not_aligned(*tensors: torch.Tensor | None) -> str | None:
    """Reason why the copy engine cannot read operands as they are; those to be copied can."""
    if any(t is not None and t.is_contiguous() and t.data_ptr() % COPY_BYTES for t in tensors):
        return f"operands of the copy engine lie at multiples of {COPY_BYTES} bytes"
    return None


def gluon_blocker() -> str | None:
    """Reason why the installed Triton lacks Gluon for this kernel, None where it has it."""
    return why_no_gluon("fastswin.ops.cluster_linear.kernel")
