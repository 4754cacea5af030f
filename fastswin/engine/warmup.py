"""Compile a plan's kernels side by side, before the first launch would compile them one by one.

Triton compiles a kernel when it is first launched, 0.3 to 3 s each, about 25 for a Swin. Its
compiler gives up Python's lock inside LLVM and the assembler is a process of its own (of 17.6 s in
six compilations the lock was held for 0.8), so threads are enough: the calls of a forward pass are
noted without being run, each distinct one is compiled in whichever thread is free, and then all are
made once in the caller's thread, which loads them (``_triton/launch.py`` says why no other may). A
kernel that is in Triton's cache on disk only has to be loaded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from fastswin._triton.launch import compiling_only
from fastswin.engine.bind import BoundPlan
from fastswin.engine.calls import Call, launches_kernel, record_calls
from fastswin.engine.forward import Forward

#: More threads wait for each other's Python parts, a tenth of the work.
MAX_THREADS = 16


def kernel_calls(
    forward: Forward, bound: BoundPlan, images: torch.Tensor, known: set[Hashable]
) -> list[Call]:
    """Distinct calls of a plan that launch kernels and are not ``known`` yet, longest first.

    Args:
        forward, bound: the model and its plan for these images.
        images: ``[B, channels, h, w]`` on the engine's device.
        known: signatures of calls made before; those returned are added.
    """
    found: list[Call] = []
    for call in record_calls(forward, bound, images, execute=False):
        if launches_kernel(call.function, call.kwargs) and call.signature not in known:
            known.add(call.signature)
            found.append(call)
    # these take longest to compile: started last, they would be waited for
    slow = ("block", "attention", "mlp")
    return sorted(found, key=lambda call: call.layer not in slow)


def begin_hashing_compiler() -> None:
    """Let Triton hash its own library (0.3 s), part of every cache key, while weights are read.

    It keeps the hash; where it does not know the function (private; Triton 3.6 and 3.8 have it) the
    first compilation computes it as before.
    """
    from triton.runtime import cache

    if triton_key := getattr(cache, "triton_key", None):
        threading.Thread(target=triton_key, name="fastswin-triton-key", daemon=True).start()


def compile_calls(calls: Sequence[Call], device: torch.device, threads: int | None = None) -> None:
    """Make every call once, compiled in threads; the device is idle afterwards.

    Args:
        calls: from :func:`kernel_calls`; what they write is scratch memory.
        device: the GPU.
        threads: None takes the cores, at most 16.

    Raises:
        Exception: the first that a call raised, as a launch would have.
    """
    if not calls:
        return
    count = min(len(calls), threads or min(MAX_THREADS, os.cpu_count() or 1))
    run_one(calls[0])  # Triton sets up its driver in this thread
    with ThreadPoolExecutor(
        count, "fastswin-compile", initializer=_enter_device, initargs=(device,)
    ) as pool:
        for _ in pool.map(_compile_one, calls[1:]):
            pass
    for call in calls[1:]:
        run_one(call)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _enter_device(device: torch.device) -> None:
    """Make the device's context current in this thread, which a first launch does by itself.

    A tensor descriptor is encoded before its launch and fails without one (seen on an H100:
    "Failed to create tensor map descriptor: invalid device context").
    """
    if device.type == "cuda":
        torch.zeros(1, device=device)


def _compile_one(call: Call) -> None:
    with compiling_only():
        run_one(call)


def run_one(call: Call) -> None:
    """One call; grad mode belongs to a thread, not to a process."""
    with torch.no_grad():
        call.run()
