"""Tensors as the kernels want them: contiguous, aligned for the tensor copy engine, described."""

from __future__ import annotations

from typing import Any

import torch

#: Alignment of what the tensor copy engine reads or writes, in bytes.
ALIGNMENT = 16


def aligned(t: torch.Tensor) -> torch.Tensor:
    """``t``, contiguous and on an address that the tensor copy engine takes."""
    t = t.contiguous()
    return t if t.data_ptr() % ALIGNMENT == 0 else t.clone()


def describe(t: torch.Tensor, rows: int, columns: int) -> Any:
    """Descriptor of ``[rows, columns]`` tiles of a matrix."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(t, [rows, columns])


def weight_descriptors(
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    parts: tuple[int, int],
    block_h: int,
    tma: bool,
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Descriptors of both column parts of fc1 and of fc2; the weights stand in where unused."""
    if not tma:
        return (fc1_weight, fc1_weight), (fc2_weight, fc2_weight)
    CA, CB = parts[0], parts[1] or parts[0]
    fc1 = describe(fc1_weight, block_h, CA), describe(fc1_weight, block_h, CB)
    fc2 = describe(fc2_weight, CA, block_h), describe(fc2_weight, CB, block_h)
    return fc1, fc2
