"""What each layer of a stage is stored and multiplied in, as readable data.

    qkv        int8 x int8 -> attention's storage of q, k and v
    attention  8-bit or wide q, k, v; writes what proj reads
    proj       adds to the stream in its epilogue, or (wide) by the library in place
    fc1        writes what fc2 reads, GELU applied
    fc2        as proj
    mlp        "fused": LayerNorm, fc1, GELU, fc2 and residual in one 8-bit kernel

A wide layer is the half-precision engine's, under the plan's own words.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Storage = Literal["int8", "fp8", "wide"]
Multiplier = Literal["triton", "cublaslt", "reference", ""]
MlpForm = Literal["split", "fused"]


@dataclasses.dataclass(frozen=True)
class LayerFormat:
    """How one linear layer runs.

    Attributes:
        format: "int8", "fp8" or "wide".
        backend: who multiplies 8-bit operands; empty for a wide layer.
    """

    format: Storage = "wide"
    backend: Multiplier = ""

    @property
    def quantized(self) -> bool:
        return self.format != "wide"

    def __str__(self) -> str:
        return f"{self.format} ({self.backend})" if self.quantized else self.format


WIDE_LAYER = LayerFormat()


@dataclasses.dataclass(frozen=True)
class BlockFormats:
    """One block's layers, what q, k and v are stored in, and in how many kernels its MLP runs."""

    qkv: LayerFormat = WIDE_LAYER
    attention: Storage = "wide"
    proj: LayerFormat = WIDE_LAYER
    fc1: LayerFormat = WIDE_LAYER
    fc2: LayerFormat = WIDE_LAYER
    mlp: MlpForm = "split"

    def endings(self, proj: str, mlp: str) -> tuple[str, str]:
        """The plan's words for proj and mlp, "quantized" where the half ends in 8 bits.

        A wide fc2 behind a quantised fc1 stands alone, as in the word "library"; one kernel for
        both is "fused", and adds what is pending like the half-precision one.
        """
        if self.proj.quantized:
            proj = "quantized"
        if self.mlp == "fused":
            mlp = "fused"
        elif self.fc2.quantized:
            mlp = "quantized"
        elif self.fc1.quantized and mlp in ("fused", "split"):
            mlp = "library"
        return proj, mlp

    def __str__(self) -> str:
        names = [f.name for f in dataclasses.fields(self) if f.name != "mlp"]
        parts = [f"{name} {getattr(self, name)}" for name in names]
        return ", ".join(parts) + (" in one kernel" if self.mlp == "fused" else "")


@dataclasses.dataclass(frozen=True)
class StageFormats:
    """A stage's blocks in order, and its patch merging; None in the last stage."""

    blocks: tuple[BlockFormats, ...]
    reduction: LayerFormat | None = None

    def layers(self) -> list[LayerFormat]:
        """Every linear layer of the stage."""
        found = [layer for b in self.blocks for layer in (b.qkv, b.proj, b.fc1, b.fc2)]
        return found if self.reduction is None else [*found, self.reduction]

    def lines(self) -> list[str]:
        """Readable lines, blocks that are alike together."""
        found: list[str] = []
        start = 0
        for number, block in enumerate(self.blocks):
            last = number + 1 == len(self.blocks)
            if last or self.blocks[number + 1] != block:
                which = f"block {start}" if start == number else f"blocks {start}-{number}"
                found.append(f"{which}: {block}")
                start = number + 1
        if self.reduction is not None:
            found.append(f"merge: reduction {self.reduction}")
        return found
