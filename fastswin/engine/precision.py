"""What each precision of the engine means.

    name   storage  products
    fp32   fp32     fp32, never TF32
    tf32   fp32     TF32 tensor cores, fp32 accumulation
    fp16   fp16     fp16 operands, fp32 accumulation
    bf16   bf16     bf16 operands, fp32 accumulation
    int8   fp32     int8 operands, int32 accumulation; on CPUs, from a calibrated model

LayerNorm, softmax, GELU and every sum are fp32 in all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Precision:
    """Storage dtype and matrix-product mode of one engine precision."""

    name: str
    dtype: torch.dtype
    tf32: bool = False

    @property
    def half(self) -> bool:
        """Whether activations are stored in two bytes."""
        return self.dtype in (torch.float16, torch.bfloat16)


PRECISIONS = {
    p.name: p
    for p in (
        Precision("fp32", torch.float32),
        Precision("tf32", torch.float32, tf32=True),
        Precision("fp16", torch.float16),
        Precision("bf16", torch.bfloat16),
    )
}

#: Needs a calibration, so it is none of those that any model can be run in.
INT8 = Precision("int8", torch.float32)


def find_precision(name: str, device: torch.device) -> Precision:
    """The precision of a name on a device.

    Raises:
        ValueError: no such precision, or the device cannot run it; the message says which can.
    """
    if name == "int8":
        if device.type != "cpu":
            raise ValueError("precision 'int8' runs on CPUs so far; use 'fp16' on a GPU")
        return INT8
    if name not in PRECISIONS:
        legal = sorted([*PRECISIONS, INT8.name])
        raise ValueError(f"precision must be one of {legal}, got {name!r}")
    if device.type == "cuda" and name in ("tf32", "bf16"):
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise ValueError(
                f"precision {name!r} needs compute capability 8.0, this GPU has {major}.{minor}; "
                "use 'fp16' or 'fp32'"
            )
    if device.type == "cpu" and name == "tf32":
        raise ValueError("precision 'tf32' needs an NVIDIA GPU; use 'fp32' on the CPU")
    return PRECISIONS[name]


@contextlib.contextmanager
def matmul_mode(precision: Precision, device: torch.device) -> Iterator[None]:
    """Library products in this precision inside the block; torch's settings are put back after it.

    Convolutions too: cuDNN's default is TF32 whatever matmul's setting is.
    """
    if device.type != "cuda" or precision.half:
        yield
        return
    # the per-backend settings: the older float32_matmul_precision raises once both were used
    general: Any = torch.backends  # the switches are missing from its type stubs
    matmul, conv = general.cuda.matmul, general.cudnn.conv
    before = (matmul.fp32_precision, conv.fp32_precision)
    # matmul's switch inherits unless set, and then reads as its parent's value: written back, that
    # value would pin it. conv's default is a tf32 of its own, as rnn's; the two must stay equal.
    inherits = before[0] == general.fp32_precision
    try:
        matmul.fp32_precision = conv.fp32_precision = "tf32" if precision.tf32 else "ieee"
        yield
    finally:
        matmul.fp32_precision = "none" if inherits else before[0]
        conv.fp32_precision = before[1]
