"""The tensor copy engine of Hopper: how operands must lie, and descriptors of their tiles.

Importing this module imports no Triton.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

#: Bytes that rows and bases are multiples of.
COPY_BYTES = 16

#: Element types by the names that Gluon has for them.
_GLUON_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and where the engine can read it; a copy where it is not."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % COPY_BYTES else tensor


def describe(t: torch.Tensor, rows: int, columns: int) -> Any:
    """Descriptor of ``[rows, columns]`` tiles of a matrix, with their layout in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(t, [rows, columns], _layout(rows, columns, t.dtype))


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """How a tile lies in shared memory; worth keeping, a training step launches 90 of these."""
    from triton.experimental.gluon import language as gl

    element = getattr(gl, _GLUON_NAMES[dtype])
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)
