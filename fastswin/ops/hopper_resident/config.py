"""Tiles of the resident kernels, what they need of the card and of shapes; imports no Triton.

``M`` rows of ``C`` channels, ``N`` output columns, ``H`` hidden units. Shared memory of a program,
in half-precision values:

    product   N' C weights + groups * 64 * (C rows + buffers * block_n results)
    MLP       stages * 2 * block_h C weights + groups * 64 * (C rows + C results)

N' is N rounded up to whole steps. Stages are all of an MLP's hidden steps where they fit, so that
its weights come once; else what fits is a ring through which they come for every round of tiles.
"""

from __future__ import annotations

import dataclasses

import torch

from fastswin._triton.available import why_no_gluon
from fastswin._triton.device import device_capability, multiprocessor_count
from fastswin._triton.tiles import cdiv

#: Channels of a row that kernels take: 64 and a second part whose width tensor cores have.
CHANNELS = (96, 128)

#: Rows of a warp group's tile.
ROWS = 64

#: Bytes of a half-precision value.
ITEMSIZE = 2

#: Bytes of weights, rows and results that a program may hold, less than the 227 KiB of compute
#: capability 9.0 by what barriers take.
RESIDENT_BYTES = 224 * 1024

#: Registers that the compiler leaves a thread of all groups but the first, by groups.
REGISTERS = {3: 160, 4: 112}

#: Rows for each multiprocessor from which a resident product pays (H200: at 128 level with programs
#: that read the weight by row blocks, at 190 faster by 1.3 to 1.5), and rows from which an MLP may.
PRODUCT_ROWS_EACH, MLP_ROWS = 128, 3136

#: Share of its warp groups that an MLP of several rounds of tiles, or one whose weights come
#: through a ring, keeps at work at least: at 0.65 SwinV2-T lost 2 %, at 0.86 it gained 0.6; with a
#: ring 8,192 rows of 128 channels took 18.5 us, by row blocks 10.5.
MLP_BUSY = 0.85


@dataclasses.dataclass(frozen=True)
class ResidentProductConfig:
    """Launch options of LayerNorm and a product.

    Attributes:
        block_n: output columns per step, 32 or 64.
        groups: warp groups, each of which takes 64 rows at a time, 3 or 4.
        buffers: steps of results that a group may have on their way to memory.
    """

    block_n: int = 64
    groups: int = 4
    buffers: int = 2

    def shared_bytes(self, N: int, C: int) -> int:
        """Weights, rows and results of a program."""
        weights = cdiv(N, self.block_n) * self.block_n * C
        return ITEMSIZE * (weights + self.groups * ROWS * (C + self.buffers * self.block_n))


@dataclasses.dataclass(frozen=True)
class ResidentMlpConfig:
    """Launch options of the MLP half of a block; three warp groups of 64 rows.

    Attributes:
        block_h: hidden units per step, 32, of 96 channels also 64.
    """

    block_h: int = 64

    @property
    def groups(self) -> int:
        """Warp groups."""
        return 3

    def stages(self, hidden: int, C: int) -> int:
        """Hidden steps whose weights a program holds."""
        room = RESIDENT_BYTES - ITEMSIZE * self.groups * ROWS * 2 * C
        return min(hidden // self.block_h, room // (ITEMSIZE * 2 * self.block_h * C))

    def shared_bytes(self, hidden: int, C: int) -> int:
        """Weights, rows and results of a program."""
        weights = self.stages(hidden, C) * 2 * self.block_h * C
        return ITEMSIZE * (weights + self.groups * ROWS * 2 * C)


def product_blocker(config: ResidentProductConfig, N: int, C: int) -> str | None:
    """Reason why a program cannot hold a product's weight, None where it can."""
    if config.block_n not in (32, 64):
        return f"block_n must be 32 or 64, got {config.block_n}"
    if config.groups not in REGISTERS:
        return f"groups must be 3 or 4, got {config.groups}"
    if config.buffers < 1:
        return f"buffers must be at least 1, got {config.buffers}"
    if N % 8 or config.block_n > N:
        return f"{N} columns are not a multiple of 8 of at least {config.block_n}"
    if blocker := _row_blocker(C):
        return blocker
    needed = config.shared_bytes(N, C)
    if needed > RESIDENT_BYTES:
        return f"{needed} bytes of shared memory exceed {RESIDENT_BYTES}"
    return None


def mlp_blocker(config: ResidentMlpConfig, hidden: int, C: int) -> str | None:
    """Reason why the kernel does not take an MLP, None where it does."""
    if config.block_h not in (32, 64):
        return f"block_h must be 32 or 64, got {config.block_h}"
    if C == CHANNELS[1] and config.block_h == 64:
        return f"registers hold no 64 hidden units beside {C} channels"
    if hidden % config.block_h or hidden == 0:
        return f"{hidden} hidden channels are not a positive multiple of {config.block_h}"
    return _row_blocker(C)


def _row_blocker(C: int) -> str | None:
    return None if C in CHANNELS else f"rows must have 96 or 128 channels, got {C}"


def why_no_resident(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why a GPU cannot run these kernels, None where it can."""
    if device.type != "cuda":
        return f"resident weights need a GPU, x is on {device.type}"
    capability = device_capability(device)
    if capability[0] != 9:
        return f"resident weights need compute capability 9.0, this is {capability}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"resident weights are float16 or bfloat16, x is {dtype}"
    return gluon_blocker()


def default_resident_product(
    M: int, N: int, C: int, multiprocessors: int
) -> ResidentProductConfig | None:
    """What a Hopper takes for LayerNorm and a product, None where another kernel is better."""
    config = ResidentProductConfig()
    if M < PRODUCT_ROWS_EACH * multiprocessors or product_blocker(config, N, C) is not None:
        return None
    return config


def default_resident_mlp(
    M: int, hidden: int, C: int, multiprocessors: int
) -> ResidentMlpConfig | None:
    """What a Hopper takes for an MLP, None where another kernel is better."""
    config = ResidentMlpConfig(64 if C < CHANNELS[1] else 32)
    if M < MLP_ROWS or mlp_blocker(config, hidden, C) is not None:
        return None
    tiles, groups = cdiv(M, ROWS), config.groups * multiprocessors
    rounds = cdiv(tiles, groups)
    kept = config.stages(hidden, C) * config.block_h == hidden
    return config if (kept and rounds == 1) or tiles >= MLP_BUSY * rounds * groups else None


def chosen_product(
    M: int, N: int, C: int, dtype: torch.dtype, device: torch.device
) -> ResidentProductConfig | None:
    """:func:`default_resident_product` of the GPU at hand, None on any other."""
    if why_no_resident(device, dtype) is not None:
        return None
    return default_resident_product(M, N, C, multiprocessor_count(device))


def chosen_mlp(
    M: int, hidden: int, C: int, dtype: torch.dtype, device: torch.device
) -> ResidentMlpConfig | None:
    """:func:`default_resident_mlp` of the GPU at hand, None on any other."""
    if why_no_resident(device, dtype) is not None:
        return None
    return default_resident_mlp(M, hidden, C, multiprocessor_count(device))


def gluon_blocker() -> str | None:
    """Reason why the installed Triton lacks Gluon for this kernel, None where it has it."""
    return why_no_gluon("fastswin.ops.hopper_resident.kernel")
