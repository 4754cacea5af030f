"""One matrix product as the library sees it: the key of everything that is cached, and its rules.

Row-major ``y [M, N] = x [M, K] @ weight [N, K].T`` is, read column by column, the product
``y.T [N, M] = weight.T.T [N, K] @ x.T [K, M]``: the library's first operand A is the weight,
transposed, its second operand B is x, as it is. That is the "TN" form which fp8 requires.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

FP8 = torch.float8_e4m3fn
HALF = (torch.float16, torch.bfloat16)

#: Largest pointer alignment that the library distinguishes, in bytes.
MAX_ALIGNMENT = 256

Scaling = Literal["none", "tensor", "channel"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Shapes, formats and epilogue of one product; hashable.

    Attributes:
        M, N, K: rows of x, output and input channels.
        dtype: of x and weight.
        out_dtype: of the output and, where there is one, the residual.
        bias_dtype: of the bias, None without one.
        gelu: whether GELU (tanh form) follows.
        residual: whether ``out_dtype [M, N]`` is added (the library's beta = 1).
        scaling: "tensor" multiplies by one factor, "channel" by a factor per row and per channel.
        output_scaled: whether the result is multiplied by one factor before it is stored.
        alignments: of weight, x, residual (or output), output and bias, in bytes, at most 256.
    """

    M: int
    N: int
    K: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None = None
    gelu: bool = False
    residual: bool = False
    scaling: Scaling = "none"
    output_scaled: bool = False
    alignments: tuple[int, int, int, int, int] = (MAX_ALIGNMENT,) * 5

    @property
    def c_dtype(self) -> torch.dtype:
        """dtype that the library's matrix C is declared in: with an fp8 output, the bias's."""
        if self.out_dtype != FP8:
            return self.out_dtype
        return self.bias_dtype or torch.float16

    def __str__(self) -> str:
        parts = [f"[{self.M}, {self.K}] @ [{self.N}, {self.K}].T", short(self.dtype)]
        parts += ["+ bias"] * (self.bias_dtype is not None) + ["+ residual"] * self.residual
        parts += ["gelu"] * self.gelu + [f"-> {short(self.out_dtype)}"]
        return " ".join(parts)


def alignment_of(address: int) -> int:
    """Alignment of an address in bytes, at most 256; 256 for a null pointer."""
    return min(MAX_ALIGNMENT, address & -address) or MAX_ALIGNMENT


def short(dtype: torch.dtype) -> str:
    """``float16`` of ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def format_blocker(
    dtype: torch.dtype, out_dtype: torch.dtype, N: int | None = None, K: int | None = None
) -> str | None:
    """Why the library has no kernel for these formats and channels; None where it has one.

    Args:
        dtype: of x and weight.
        out_dtype: of the output.
        N, K: output and input channels; None is any that fit.
    """
    if dtype != FP8 and dtype not in HALF:
        return f"dtype {short(dtype)} is not one of float16, bfloat16, float8_e4m3fn"
    if dtype != FP8 and out_dtype != dtype:
        return f"{short(dtype)} operands store {short(dtype)}, not {short(out_dtype)}"
    if out_dtype not in (*HALF, FP8):
        return f"out_dtype {short(out_dtype)} is not one of float16, bfloat16, float8_e4m3fn"
    if K == 0:
        return "a product without input channels needs no library"
    if dtype == FP8:  # rows of 16 bytes: Tensor Core requirements of fp8 in the cuBLAS manual
        for name, size in (("input", K), ("output", N)):
            if size is not None and size % 16:
                return f"{size} {name} channels in fp8 are not a multiple of 16"
    return None
