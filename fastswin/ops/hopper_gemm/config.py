"""Tiles of the Hopper product, what it needs of the card and of shapes; imports no Triton.

``M`` rows, ``N`` output and ``K`` input channels. Shared memory of a program, in bytes:

    stages * (block_m + block_n) * block_k * itemsize       ring of operand tiles
    groups * buffers * block_m * chunk * itemsize            results on their way to memory
    about 2 KiB                                              barriers, column sums
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from fastswin._triton.available import why_no_gluon
from fastswin._triton.device import device_capability, multiprocessor_count
from fastswin._triton.tensor_copy import COPY_BYTES
from fastswin._triton.tiles import cdiv

#: Bytes of a row of one store, what a row of shared memory swizzles.
CHUNK_BYTES = 128

#: Bytes that a program may use, less than the 227 KiB of compute capability 9.0 by what barriers
#: and sums over columns take.
RING_AND_STAGING_BYTES = 224 * 1024

#: Registers that the compiler is told to leave a thread of all groups but the first, by groups and
#: warps of each: what 65,536 registers and the loading warp allow.
REGISTERS = {(2, 4): 240, (2, 8): 112, (3, 4): 160}


@dataclasses.dataclass(frozen=True)
class HopperGemmConfig:
    """Launch options.

    Attributes:
        block_m, block_n, block_k: tile of a group's product.
        stages: operand tiles in the ring.
        groups: groups of warps that take turns, 2 or 3.
        warps: warps of a group: 4, or 8 where there are two groups. Two warps share what GELU costs
            on each of a multiprocessor's schedulers where one alone would wait for itself.
        buffers: chunks of results that a group may have on their way; in the backward one more than
            a tile has.
        bias_first: sums start with the bias, instead of adding it behind the products.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    groups: int = 2
    warps: int = 8
    buffers: int = 2
    bias_first: bool = True

    def chunk(self, itemsize: int) -> int:
        """Columns per store of results of ``itemsize`` bytes."""
        return min(self.block_n, CHUNK_BYTES // itemsize)

    @property
    def registers(self) -> int:
        """Registers per thread of all groups but the first, which gets what is left."""
        return REGISTERS[self.groups, self.warps]

    def shared_bytes(self, itemsize: int) -> int:
        """Ring and staging of a program; operands and results of ``itemsize`` bytes."""
        ring = self.stages * (self.block_m + self.block_n) * self.block_k
        staging = self.groups * self.buffers * self.block_m * self.chunk(itemsize)
        return (ring + staging) * itemsize


#: Tiles that fill an H100's shared memory in half precision; in the backward ``pre`` comes and
#: ``dpre`` and ``act`` leave through it.
DEFAULT_CONFIG = HopperGemmConfig(128, 128, 64, stages=5)
DEFAULT_BACKWARD = HopperGemmConfig(128, 128, 64, stages=4, buffers=3)

#: What is computed behind the product: bias and GELU, the bias alone, bias and GELU with the
#: pre-activation kept, or GELU's derivative with sums over columns.
Form = Literal["linear", "plain", "training", "backward"]

#: Groups of 4 warps with the bias behind the products: fewer instructions where products bind.
PLAIN_CONFIG = HopperGemmConfig(128, 128, 64, stages=5, warps=4, bias_first=False)

#: Tiles by form and input channels where an H200 showed the product right and faster than the own
#: kernels of ops.linear (with GELU) and ops.feed_forward, by 1.03 to 1.19, 1.32 to 1.50 and 1.21 to
#: 1.25, and plain than the library, by 1.10 to 1.37 (docs/performance.md).
MEASURED: dict[tuple[Form, int], HopperGemmConfig] = {
    **{("linear", K): DEFAULT_CONFIG for K in (96, 192, 256, 384, 512)},
    ("linear", 768): PLAIN_CONFIG,
    **{("plain", K): PLAIN_CONFIG for K in (192, 256, 384, 512, 768)},
    **{("training", K): DEFAULT_CONFIG for K in (256, 384, 512)},
    **{("backward", K): DEFAULT_BACKWARD for K in (256, 512)},
    ("backward", 384): HopperGemmConfig(128, 64, 64, 5, groups=3, warps=4, buffers=2),
}

#: What ``impl="auto"`` takes of it: whole models became 1 to 3 % faster, a step of Swin-B 3 %.
CHOSEN: dict[tuple[Form, int], HopperGemmConfig] = MEASURED

#: What takes its place up to so many rows, where a program has two or three tiles and GELU of the
#: last stands alone: 1,568 rows to 3,072 columns 17.9 us for 18.9 (H200).
FEW_ROWS: dict[tuple[Form, int], tuple[int, HopperGemmConfig]] = {
    ("linear", 768): (2048, DEFAULT_CONFIG)
}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Who computes what.

    Attributes:
        tiles: output tiles of the launch, halves counted as such.
        programs: programs of the launch.
        steps: steps along K of one tile.
        columns: tiles side by side.
        rounds: whole tiles of every program where halves follow; 0 without halves.
    """

    tiles: int
    programs: int
    steps: int
    columns: int
    rounds: int = 0


def schedule(
    M: int, N: int, K: int, config: HopperGemmConfig, multiprocessors: int, halve: bool = False
) -> Schedule:
    """Tiles, programs and steps of a product; one program per multiprocessor at most.

    Args:
        M, N, K: rows, output and input channels.
        config: tiles.
        multiprocessors: of the GPU.
        halve: whether tiles beyond the last full round become halves where each program then has
            one at most: 588 tiles on 132 multiprocessors are four rounds and 120 halves instead of
            five rounds, 7 % less time. Two halves for a program take as long as a tile.
    """
    columns = cdiv(N, config.block_n)
    tiles = cdiv(M, config.block_m) * columns
    programs, steps = min(tiles, multiprocessors), cdiv(K, config.block_k)
    if halve and programs:
        rounds, left = divmod(tiles, programs)
        if 0 < 2 * left <= programs:
            return Schedule(tiles + left, programs, steps, columns, rounds)
    return Schedule(tiles, programs, steps, columns)


def shape_blocker(N: int, K: int, itemsize: int) -> str | None:
    """Reason why the tensor copy engine does not take these rows, None where it does."""
    for name, size in (("output", N), ("input", K)):
        if size * itemsize % COPY_BYTES or size == 0:
            return f"{size} {name} channels are not a positive multiple of {COPY_BYTES // itemsize}"
    return None


def config_blocker(config: HopperGemmConfig, form: Form, itemsize: int) -> str | None:
    """Reason why tiles do not fit a program, None where they do."""
    if (config.groups, config.warps) not in REGISTERS:
        legal = " or ".join(f"{groups} of {warps}" for groups, warps in REGISTERS)
        return f"groups and warps must be {legal}, got {config.groups} of {config.warps}"
    if config.block_m % (16 * config.warps):
        return f"block_m must be a multiple of {16 * config.warps}, 16 for each warp of a group"
    needed = config.shared_bytes(itemsize)
    if needed > RING_AND_STAGING_BYTES:
        return f"{needed} bytes of shared memory exceed {RING_AND_STAGING_BYTES}"
    buffers = config.block_n // config.chunk(itemsize) + 1
    if form == "backward" and config.buffers != buffers:
        return f"the backward needs {buffers} buffers for {config.block_n} columns"
    return None


def why_no_hopper_gemm(
    device: torch.device, dtype: torch.dtype, N: int, K: int, tf32: bool = False
) -> str | None:
    """Reason why the product cannot run here, None where it can.

    Args:
        device: where the operands are.
        dtype: of operands and result.
        N, K: output and input channels.
        tf32: whether fp32 operands may be cut to TF32.
    """
    if device.type != "cuda":
        return f"the Hopper product needs a GPU, x is on {device.type}"
    capability = device_capability(device)
    if capability[0] != 9:
        return f"the Hopper product needs compute capability 9.0, this is {capability}"
    taken = (torch.float16, torch.bfloat16) + (torch.float32,) * tf32
    if dtype not in taken:
        return f"the Hopper product takes float16, bfloat16 and, in tf32, float32; x is {dtype}"
    return shape_blocker(N, K, dtype.itemsize) or gluon_blocker()


def measured_config(
    form: Form, M: int, N: int, K: int, dtype: torch.dtype, device: torch.device
) -> HopperGemmConfig | None:
    """Tiles where ``impl="auto"`` takes the Hopper product, None where another kernel is better.

    Args:
        form: what is computed behind the product.
        M, N, K: rows, output and input channels.
        dtype: of operands and result.
        device: where they are.
    """
    if (form, K) not in CHOSEN or why_no_hopper_gemm(device, dtype, N, K) is not None:
        return None
    return chosen_config(form, M, N, K, dtype.itemsize, multiprocessor_count(device))


def chosen_config(
    form: Form, M: int, N: int, K: int, itemsize: int, multiprocessors: int
) -> HopperGemmConfig | None:
    """:func:`measured_config` of a GPU that can run the product.

    Args:
        form: what is computed behind the product.
        M, N, K: rows, output and input channels.
        itemsize: bytes of an operand's element.
        multiprocessors: of the GPU.
    """
    config = CHOSEN.get((form, K))
    most, of_few = FEW_ROWS.get((form, K), (0, config))
    if M <= most:
        config = of_few
    if config is None or config_blocker(config, form, itemsize) is not None:
        return None
    # fewer tiles leave a warp group without work while the other is in its epilogue; with GELU half
    # a tile for the second group is enough (1,568 x 384 to 1,536: 7.9 us, ops.linear's own 9.2)
    plan = schedule(M, N, K, config, multiprocessors, halve=form == "linear")
    enough = plan.rounds > 0 or plan.tiles >= 2 * multiprocessors
    return config if enough else None


def hopper_reason(
    M: int, N: int, K: int, dtype: torch.dtype, device: torch.device
) -> dict[str, str]:
    """What a report says of fc1 with GELU: nothing where the Hopper product was not measured."""
    if ("linear", K) not in CHOSEN or device.type != "cuda":
        return {}
    if measured_config("linear", M, N, K, dtype, device) is not None:
        return {"fc1": "GELU beside the products of the next tile (ops/hopper_gemm)"}
    blocker = why_no_hopper_gemm(device, dtype, N, K)
    return {} if blocker is None else {"fc1": f"our plain GEMM: {blocker}"}


def gluon_blocker() -> str | None:
    """Reason why the installed Triton lacks Gluon for this kernel, None where it has it."""
    return why_no_gluon("fastswin.ops.hopper_gemm.kernel")
