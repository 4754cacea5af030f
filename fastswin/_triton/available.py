"""Can a Triton kernel run on this tensor, and if not, why?

Importing this module imports no Triton: ``fastswin`` works where Triton is not installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Literal, get_args

import torch

Impl = Literal["auto", "triton", "reference"]

TRITON_INSTALLED = importlib.util.find_spec("triton") is not None

#: Smallest compute capability the kernels are compiled and tested for.
MIN_CAPABILITY = (7, 5)


def interpreting() -> bool:
    """Whether kernels run on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@functools.cache
def capability(device_index: int) -> tuple[int, int]:
    """Compute capability ``(major, minor)`` of one GPU."""
    return torch.cuda.get_device_capability(device_index)


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """None where Triton can take tensors of this device and dtype, else the reason."""
    if not TRITON_INSTALLED:
        return "Triton is not installed"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {dtype} is not one of float32, float16, bfloat16"
    if device.type == "cpu":
        return None if interpreting() else "the tensors are on the CPU and TRITON_INTERPRET is off"
    if device.type != "cuda":
        return f"device {device} is not a CUDA device"
    if torch.version.hip is not None:
        return "this is a ROCm build; the kernels are tested on NVIDIA GPUs only"
    index = torch.cuda.current_device() if device.index is None else device.index
    found = capability(index)
    if found < MIN_CAPABILITY:
        return f"compute capability {found} is below {MIN_CAPABILITY}"
    if dtype == torch.bfloat16 and found < (8, 0):
        return f"bfloat16 needs compute capability 8.0, this GPU has {found[0]}.{found[1]}"
    return None


@functools.cache
def why_no_gluon(kernel_module: str) -> str | None:
    """Reason why the installed Triton lacks the Gluon of a Hopper kernel, None where it has it.

    Args:
        kernel_module: full name of the module that holds the kernel; it is imported.
    """
    try:
        importlib.import_module(kernel_module)
    except (ImportError, AttributeError, TypeError) as error:
        return f"this Triton lacks Gluon for Hopper: {error}"
    return None


def why_not_half(dtype: torch.dtype) -> str | None:
    """Reason against a matrix-product kernel: it is written for tensor cores.

    In fp32 the products would be chains of fused multiply-adds, slower than the library's and, as
    the chain has K links, two to three times as far from the fp64 oracle.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return None
    return f"{str(dtype).removeprefix('torch.')} products are faster and closer in the library"


def why_no_tensor_cores(device: torch.device, dtype: torch.dtype, fp32_form: bool) -> str | None:
    """Reason against a product of tensor cores; ``fp32_form`` says that fp32 may be cut to TF32."""
    if dtype != torch.float32 or not fp32_form:
        return why_not_half(dtype)
    if device.type == "cuda" and capability(device.index or 0) < (8, 0):
        return "TF32 needs compute capability 8.0"
    return None


def why_no_gradient(*tensors: torch.Tensor | None) -> str | None:
    """Reason against a kernel without a backward: a gradient is needed. None where it is not."""
    needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return "a gradient is needed and the kernel has no backward" if needed else None


def choose_impl(impl: str, op: str, blockers: list[str | None]) -> Literal["triton", "reference"]:
    """Resolve ``impl=``: "auto" falls back to the reference, an explicit "triton" never does.

    Under ``TRITON_INTERPRET=1`` only an explicit "triton" runs kernels (on the CPU, slowly).

    Args:
        impl: what the caller asked for.
        op: operator name for messages.
        blockers: reasons against Triton, None where there is none.

    Raises:
        ValueError: unknown ``impl``.
        RuntimeError: ``impl="triton"`` cannot run; the message says why.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"impl must be one of {get_args(Impl)}, got {impl!r}")
    if impl == "reference" or (impl == "auto" and interpreting()):  # the interpreter is a test tool
        return "reference"
    reason = next((b for b in blockers if b), None)
    if reason is None:
        return "triton"
    if impl == "triton":
        raise RuntimeError(f"{op}: impl='triton' cannot run here: {reason}")
    return "reference"
