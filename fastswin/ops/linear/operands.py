"""What every GEMM launcher does first: contiguous operands, the product's sizes, room for it.

    x [..., K]   weight [N, K]   bias [N]   offset [K]   residual, out [..., N]

Kernels take row lengths for strides; what lies otherwise in memory is copied. Imports no Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Operands(NamedTuple):
    """Tensors of one product as a kernel takes them, absent ones still None, and its sizes."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    offset: torch.Tensor | None
    residual: torch.Tensor | None
    out: torch.Tensor
    M: int
    N: int
    K: int

    def pointers(self, *names: str) -> tuple[torch.Tensor, ...]:
        """The named tensors; x stands in for absent ones, which kernels do not touch."""
        found = (getattr(self, name) for name in names)
        return tuple(self.x if tensor is None else tensor for tensor in found)


def prepare_operands(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    offset: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    rows: tuple[int, ...] | None = None,
) -> Operands:
    """Contiguous operands, and ``out`` where there is none.

    Args:
        rows: leading axes of the result; None takes x's.
    """
    N, K = weight.shape
    if out is None:
        out = x.new_empty(*(x.shape[:-1] if rows is None else rows), N)
    return Operands(
        x.contiguous(),
        weight.contiguous(),
        _contiguous(bias),
        _contiguous(offset),
        _contiguous(residual),
        out,
        out.numel() // N if N else 0,
        N,
        K,
    )


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()
