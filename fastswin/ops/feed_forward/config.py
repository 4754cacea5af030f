"""Which kernels a feed-forward layer of a shape takes, and their tiles; imports no Triton.

    library    cuBLAS products; GELU and its derivative are passes of their own over [M, hidden]
    epilogue   our products fc1 and dy fc2 with GELU and its derivative at their stores; on Hopper
               where measured those of ops/hopper_gemm, which overlap both
    fused      one kernel a direction, the hidden tile stays on the chip; x alone is kept

Bytes in units of ``M * C * itemsize``, weight gradients (10 in every form) left out:

               forward                         backward                               kept
    library    5 fc1, 8 GELU, 5 fc2 = 18       5 dh, 16 GELU', 5 dx = 26              pre: 4
    epilogue   9 fc1, 5 fc2 = 14               13 dh, 5 dx = 18                       pre: 4
    fused      2                               11 (2 in; act, dpre 8 and dx out)      0
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from fastswin._triton.tiles import split_columns
from fastswin.ops.hopper_gemm.config import HopperGemmConfig

Form = Literal["library", "epilogue", "fused"]

#: Widest rows whose dx a program accumulates in registers beside two hidden tiles.
MAX_FUSED_CHANNELS = 192

#: Every fused configuration's hidden step divides this.
HIDDEN_STEP = 128


@dataclasses.dataclass(frozen=True)
class FusedConfig:
    """Launch options of a fused kernel.

    Attributes:
        block_m: rows per tile.
        block_h: hidden units per step.
        num_warps: warps per program.
        num_stages: depth of the weight pipeline over steps.
        tma: weights come through the tensor copy engine (compute capability 9.0 and later), in
            the backward rows and dx as well.
        tma_store: hidden tiles leave through it; backward only.
        max_registers: registers per thread at most, 0 for the compiler's choice.
    """

    block_m: int
    block_h: int
    num_warps: int
    num_stages: int
    tma: bool = False
    tma_store: bool = False
    max_registers: int = 0

    @property
    def register_limit(self) -> dict[str, int]:
        """Launch option that limits registers, or none."""
        return {"maxnreg": self.max_registers} if self.max_registers else {}


@dataclasses.dataclass(frozen=True)
class EpilogueConfig:
    """Launch options of a product with GELU, or its derivative, at its store.

    Operands come through the tensor copy engine (compute capability 9.0 and later).

    Attributes:
        block_m, block_n, block_k: tile of the product.
        num_warps: warps per program.
        num_stages: depth of the load pipeline over K.
        persistent: programs per multiprocessor that walk over tiles; 0 gives one per tile.
        tma_hidden: hidden tiles come and leave through it as well.
        max_registers: registers per thread at most, 0 for the compiler's choice.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    persistent: int = 0
    tma_hidden: bool = False
    max_registers: int = 0

    @property
    def register_limit(self) -> dict[str, int]:
        """Launch option that limits registers, or none."""
        return {"maxnreg": self.max_registers} if self.max_registers else {}


@dataclasses.dataclass(frozen=True)
class FeedForwardConfig:
    """Form of each direction; None stands for the library's products.

    Attributes:
        forward, backward: both fused, or neither: what the forward keeps differs.
        weights_in_fp32: weight gradients leave the products in fp32 where the weights are fp32,
            instead of being cast afterwards (GPU only).
    """

    forward: FusedConfig | EpilogueConfig | HopperGemmConfig | None = None
    backward: FusedConfig | EpilogueConfig | HopperGemmConfig | None = None
    weights_in_fp32: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.forward, FusedConfig) != isinstance(self.backward, FusedConfig):
            raise ValueError("forward and backward must both be fused or neither")

    @property
    def fused(self) -> bool:
        """Whether nothing but the input is kept."""
        return isinstance(self.forward, FusedConfig)


#: Forward and backward of layers too wide for the fused form, where epilogues can run: 2 to 10 %
#: faster than the library's products and passes from C = 256 to 1024 (H100, batch 128).
WIDE_FORMS: tuple[Form, Form] = ("epilogue", "epilogue")

#: 80 registers and 72 KiB: three programs of 8 warps share an H100's multiprocessor, so that the
#: stores of one, which are most of its bytes, overlap the products of the others.
DEFAULT_EPILOGUE = EpilogueConfig(128, 64, 64, num_warps=8, num_stages=3, tma_hidden=True)


def fused_blocker(C: int, hidden: int, out_channels: int) -> str | None:
    """Reason why one kernel cannot hold this layer, None where it can."""
    if C > MAX_FUSED_CHANNELS:
        return f"{C} channels exceed {MAX_FUSED_CHANNELS}"
    if split_columns(C) is None:
        return f"{C} channels are not one or two powers of two of at least 16"
    if hidden % HIDDEN_STEP:
        return f"{hidden} hidden channels are not a multiple of {HIDDEN_STEP}"
    if out_channels != C:
        return f"{out_channels} output channels are not the {C} of the input"
    return None


def epilogue_blocker(C: int, hidden: int, out_channels: int) -> str | None:
    """Reason against products through the tensor copy engine: rows of 16 bytes; None for none."""
    for name, size in (("input", C), ("hidden", hidden), ("output", out_channels)):
        if size % 8:
            return f"{size} {name} channels are not a multiple of 8"
    return None


def default_forms(
    C: int, hidden: int, out_channels: int, dtype: torch.dtype, capability: tuple[int, int]
) -> tuple[Form, Form]:
    """Form of the forward and of the backward; torch.compile sees through this.

    Args:
        C, hidden, out_channels: of the layer.
        dtype: of the products.
        capability: of the GPU.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    if not half or capability < (8, 0):
        return "library", "library"
    if fused_blocker(C, hidden, out_channels) is None:
        return "fused", "fused"
    if _copy_engine(capability) and epilogue_blocker(C, hidden, out_channels) is None:
        return WIDE_FORMS
    return "library", "library"


def default_config(
    C: int, hidden: int, out_channels: int, dtype: torch.dtype, capability: tuple[int, int]
) -> FeedForwardConfig:
    """Heuristic from a prototype's measurements on an H100 and from what the compiler reports.

    Args:
        C, hidden, out_channels, dtype, capability: as in :func:`default_forms`.
    """
    forward, backward = default_forms(C, hidden, out_channels, dtype, capability)
    if forward == "fused":
        return FeedForwardConfig(
            default_fused_forward(C, capability), default_fused_backward(C, capability)
        )
    return FeedForwardConfig(
        DEFAULT_EPILOGUE if forward == "epilogue" else None,
        DEFAULT_EPILOGUE if backward == "epilogue" else None,
    )


def _copy_engine(capability: tuple[int, int]) -> bool:
    return capability[0] in (9, 10)


def default_fused_forward(C: int, capability: tuple[int, int]) -> FusedConfig:
    """The tiles of ``ops.mlp``, whose kernel has the same products."""
    if not _copy_engine(capability):  # 99 to 163 KiB of shared memory
        if C <= 128:
            return FusedConfig(64, 64, num_warps=4, num_stages=2)
        return FusedConfig(64, 32, num_warps=8, num_stages=2)
    if C < 128:
        return FusedConfig(128, 64, num_warps=4, num_stages=2, tma=True)
    if C == 128:
        return FusedConfig(64, 64, num_warps=4, num_stages=3, tma=True)
    return FusedConfig(128, 64, num_warps=8, num_stages=2, tma=True)


def default_fused_backward(C: int, capability: tuple[int, int]) -> FusedConfig:
    """Fastest of nine on an H100 at batch 128 (docs/performance.md)."""
    if not _copy_engine(capability):
        return FusedConfig(64 if C <= 128 else 32, 32, num_warps=4, num_stages=2)
    if C <= 128:
        return FusedConfig(64, 32, num_warps=4, num_stages=3, tma=True, tma_store=True)
    return FusedConfig(128, 64, num_warps=8, num_stages=2, tma=True, tma_store=True)
