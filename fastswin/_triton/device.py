"""The GPU that a launch goes to: taken from the tensors, never from the current device."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager

import torch

from fastswin._triton.available import capability

#: Compute capability of the kernels in Gluon, which are written for nothing else.
HOPPER = (9, 0)

#: Assumed for the CPU interpreter, so that its heuristics follow an H100's.
INTERPRETER_MULTIPROCESSORS = 132
INTERPRETER_CAPABILITY = HOPPER


def multiprocessor_count(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU (an H100's number on the CPU interpreter)."""
    if device.type != "cuda":
        return INTERPRETER_MULTIPROCESSORS
    return _cuda_multiprocessors(
        torch.cuda.current_device() if device.index is None else device.index
    )


@functools.cache
def _cuda_multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def device_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of the tensors' GPU (an H100's on the CPU interpreter)."""
    if device.type != "cuda":
        return INTERPRETER_CAPABILITY
    return capability(torch.cuda.current_device() if device.index is None else device.index)


def on_device(device: torch.device) -> AbstractContextManager:
    """Make ``device`` current for a launch and restore the former one after it."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)
