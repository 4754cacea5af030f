"""What forward and backward launches share: the shape of a problem and its constants."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fastswin._triton.tiles import next_power_of_2
from fastswin.ops.window_attention.dropout import drop_threshold
from fastswin.ops.window_attention.geometry import num_windows

Pair = tuple[int, int]
Strides = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """One problem, in image order or as windows that are cut already.

    Attributes:
        windows: windows in the whole batch.
        map_size: ``(H, W)`` of the map; ``(1, N)`` when partitioned.
        grid_size: windows per column and per row of a map.
        heads, head_dim: ``nH`` and ``D``.
        window_size, shift_size: in tokens.
        partitioned: whether the input is ``[B_, nH, N, D]``.
    """

    windows: int
    map_size: Pair
    grid_size: Pair
    heads: int
    head_dim: int
    window_size: Pair
    shift_size: Pair
    partitioned: bool

    @property
    def tokens(self) -> int:
        return self.window_size[0] * self.window_size[1]

    @property
    def padded_size(self) -> Pair:
        """The map with its padding."""
        return (
            self.grid_size[0] * self.window_size[0],
            self.grid_size[1] * self.window_size[1],
        )

    @property
    def padding_slots(self) -> int:
        """Padded tokens per image: first those right of the map, then the rows below it."""
        padded, real = self.padded_size, self.map_size
        return padded[0] * padded[1] - real[0] * real[1]

    def constants(
        self, bias: torch.Tensor, products: str, strides: list[Strides]
    ) -> dict[str, Any]:
        """Compile-time constants of every kernel.

        Args:
            bias: the packed table.
            products: of fp32 operands, a word of :func:`products_form`.
            strides: (image, row, head) of each tensor that rows are read from or written to.
        """
        rows = self.map_size[0] * self.map_size[1]
        # in-image offsets are 32-bit unless a single image passes 2**31 elements
        wide = any(row * rows >= 2**31 for _, row, _ in strides)
        return {
            "N": self.tokens, "NP": bias.shape[-1], "NH": self.heads, "D": self.head_dim,
            "BLOCK_D": max(16, next_power_of_2(self.head_dim)),
            "WH": self.window_size[0], "WW": self.window_size[1],
            "SH": self.shift_size[0], "SW": self.shift_size[1],
            "PARTITIONED": self.partitioned, "HAS_PAD": self.padding_slots > 0,
            "PRECISION": products, "WIDE": wide,
        }  # fmt: skip


def products_form(tf32: bool, split: bool = False) -> str:
    """Triton's word for products of fp32 operands: IEEE, TF32, or the sum of three of TF32."""
    if tf32:
        return "tf32"
    return "tf32x3" if split else "ieee"


def image_shape(
    qkv: torch.Tensor, num_heads: int, window_size: Pair, shift_size: Pair
) -> AttentionShape:
    """Of ``qkv [B, H, W, 3C]``."""
    B, H, W, channels = qkv.shape
    rows, cols = num_windows((H, W), window_size)
    return AttentionShape(
        B * rows * cols, (H, W), (rows, cols), num_heads, channels // 3 // num_heads,
        window_size, shift_size, partitioned=False,
    )  # fmt: skip


def partitioned_shape(q: torch.Tensor) -> AttentionShape:
    """Of ``q [B_, nH, N, D]``."""
    windows, heads, N, D = q.shape
    return AttentionShape(
        windows, (1, N), (1, 1), heads, D, (1, N), (0, 0), partitioned=True
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Attention dropout of one call: a seed on the device, and the probability."""

    seed: torch.Tensor
    p: float

    @property
    def threshold(self) -> int:
        return drop_threshold(self.p)

    @property
    def factor(self) -> float:
        """What a kept weight is multiplied by."""
        return 1.0 / (1.0 - self.p)


def dropout_arguments(
    dropout: Dropout | None, stand_in: torch.Tensor
) -> tuple[torch.Tensor, int, float]:
    """Seed, threshold and factor as kernel arguments; a stand-in pointer without dropout."""
    if dropout is None:
        return stand_in, 0, 1.0
    return dropout.seed, dropout.threshold, dropout.factor


def check_grid(programs: int) -> None:
    """Raise ValueError where a launch would have more programs than grid.x takes."""
    if programs >= 2**31:
        raise ValueError(f"{programs} programs exceed the grid limit of 2**31 - 1; split the batch")


def qkv_strides(shape: AttentionShape) -> list[Strides]:
    """Strides of q, k and v inside a contiguous ``[B, H, W, 3, nH, D]``."""
    H, W = shape.map_size
    channels = 3 * shape.heads * shape.head_dim
    return [(H * W * channels, channels, shape.head_dim)] * 3


def output_strides(shape: AttentionShape) -> Strides:
    """Strides of a contiguous output, ``[B, H, W, nH, D]`` or ``[B_, nH, N, D]``."""
    H, W = shape.map_size
    C = shape.heads * shape.head_dim
    if shape.partitioned:
        return H * W * C, shape.head_dim, W * shape.head_dim
    return H * W * C, C, shape.head_dim


def window_strides(t: torch.Tensor) -> Strides:
    """(image, row, head) strides of ``[B_, nH, N, D]``."""
    return t.stride(0), t.stride(2), t.stride(1)
