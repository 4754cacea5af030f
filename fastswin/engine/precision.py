"""What each precision of the engine means.

    name        storage  products
    fp32        fp32     fp32, or three of TF32 that are closer to fp64 (tf32.py); never one
    tf32        fp32     TF32 tensor cores, fp32 accumulation
    fp16        fp16     fp16 operands, fp32 accumulation
    bf16        bf16     bf16 operands, fp32 accumulation
    int8        wide     int8 operands, int32 accumulation; from a calibrated model
    int8_mode1  wide     the same, every product's output stored in 8 bits
    int8_mode2  wide     the same but for fc2 and patch merging
    fp8         wide     e4m3 operands, fp32 accumulation; from a calibrated model

LayerNorm, softmax, GELU and every sum are fp32 in all of them. The wide storage of a quantised
precision (the residual stream, and every layer that is not quantised) is fp16 on a GPU, fp32 on a
CPU, or what the engine is told.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch

from fastswin.ops.quantize.checks import MIN_CAPABILITY


@dataclasses.dataclass(frozen=True)
class Precision:
    """Storage dtype and matrix-product mode of one engine precision.

    ``format`` is "int8" or "fp8" where calibrated layers multiply in 8 bits, else None.
    """

    name: str
    dtype: torch.dtype
    tf32: bool = False
    format: str | None = None

    @property
    def quantized(self) -> bool:
        """Whether it needs a calibrated model."""
        return self.format is not None

    @property
    def wide(self) -> Precision:
        """The precision of what is not quantised; itself where nothing is."""
        if not self.quantized:
            return self
        return next(p for p in PRECISIONS.values() if p.dtype == self.dtype)

    @property
    def input_precision(self) -> Literal["tf32"] | None:
        """How our products take fp32 operands; None where they are half or the library's."""
        return "tf32" if self.tf32 else None

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

#: Formats of the precisions that need a calibration, so none that any model can be run in.
QUANTIZED = {"int8": "int8", "int8_mode1": "int8", "int8_mode2": "int8", "fp8": "fp8"}

#: Storage of each format.
FORMAT_DTYPES: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def find_precision(
    name: str, device: torch.device, wide_dtype: torch.dtype | None = None
) -> Precision:
    """The precision of a name on a device.

    Args:
        name: of :data:`PRECISIONS` or :data:`QUANTIZED`.
        device: where it is to run.
        wide_dtype: storage beside the 8-bit layers of a quantised precision; None takes fp16 on a
            GPU and fp32 on a CPU.

    Raises:
        ValueError: no such precision, or the device cannot run it; the message says which can.
    """
    if name in QUANTIZED:
        return _quantized(name, device, wide_dtype)
    if wide_dtype is not None:
        raise ValueError(
            f"wide_dtype is for quantised precisions {sorted(QUANTIZED)}, got precision {name!r}"
        )
    if name not in PRECISIONS:
        legal = sorted([*PRECISIONS, *QUANTIZED])
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


def _quantized(name: str, device: torch.device, wide_dtype: torch.dtype | None) -> Precision:
    format = QUANTIZED[name]
    legal: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    if device.type == "cpu":
        legal += (torch.float32,)
    else:
        capability = torch.cuda.get_device_capability(device)
        if capability < (needed := MIN_CAPABILITY[FORMAT_DTYPES[format]]):
            found, first = (".".join(map(str, version)) for version in (capability, needed))
            raise ValueError(
                f"precision {name!r} needs compute capability {first}, this GPU has {found}; use "
                + ("'int8' or 'fp16'" if format == "fp8" else "'fp16'")
            )
    dtype = wide_dtype or (torch.float32 if device.type == "cpu" else torch.float16)
    if dtype not in legal:
        raise ValueError(f"wide_dtype must be one of {legal} on {device}, got {dtype}")
    return Precision(name, dtype, format=format)


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
