"""Launches in clusters: programs of one multiprocessor cluster that reach each other's memory.

A kernel is compiled as if for single programs and launched with a cluster's size, so it says itself
what its programs do: program ``i`` is number ``i % size`` of cluster ``i // size``. Behind the
shared memory that the compiler counted each program has some bytes more, which are the kernel's to
use by address (cluster_memory.py). Up to 8 programs anywhere, up to 16 where a card's clusters hold
so many, which the driver is asked.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Hashable
from typing import Any

from fastswin._triton.available import interpreting
from fastswin._triton.device import HOPPER, on_device
from fastswin._triton.launch import compiles_only, kind_of_call, on_grid

#: Shared memory that a kernel has without asking; Triton asks for those that it counts more for.
_UNASKED_BYTES = 48 * 1024

#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES (cuda.h).
_MOST_SHARED_BYTES = 8

#: Kernels ready for launches in clusters, with the parameters behind their arguments, by call.
_CLUSTERED: dict[Hashable, tuple[Any, list[tuple[str, Any]], int]] = {}


def why_no_clusters(device_type: str, capability: tuple[int, int]) -> str | None:
    """Reason why a device does not run kernels in clusters, None where it does."""
    if device_type != "cuda" or interpreting():
        return "clusters of programs need a GPU"
    if capability != HOPPER:
        return f"the kernel is written for compute capability 9.0, this is {capability}"
    return None


def launch_clusters(
    kernel: Any,
    clusters: int,
    size: int,
    tail_bytes: int,
    *arguments: Any,
    buffer_bytes: int | None = None,
    **constants: Any,
) -> None:
    """Run ``kernel`` in ``clusters`` clusters of ``size`` programs, on its first argument's device.

    Args:
        kernel: a ``triton.jit`` or ``gluon.jit`` function.
        clusters, size: the grid has ``clusters * size`` programs along its first axis.
        tail_bytes: shared memory of each program behind what the compiler counted.
        arguments: run-time arguments in order, the first one a tensor.
        buffer_bytes: of the kernel's only buffer, where it takes for granted that this begins where
            shared memory does (tile_copies.py).
        constants: every other parameter by name, and launch options such as ``num_warps``.

    Raises:
        RuntimeError: the device holds no such cluster, or the compiler has placed more than the
            only buffer.
    """
    if compiles_only():
        on_grid(kernel, (clusters * size,))(*arguments, **constants)
        return
    with on_device(arguments[0].device):
        compiled, behind, at_once = _clustered(kernel, size, tail_bytes, arguments, constants)
        if compiled is not None:
            shared = compiled.packed_metadata[2]
            if buffer_bytes is not None and shared != buffer_bytes + tail_bytes:
                raise RuntimeError(
                    f"this Triton gives a kernel {shared - tail_bytes} bytes of shared memory, of "
                    f"which its only buffer has {buffer_bytes}: where that begins is not known"
                )
            if at_once == 0:
                raise RuntimeError(
                    f"this device holds no cluster of {size} programs with {shared} bytes of "
                    "shared memory each"
                )
            compiled[(clusters, 1, 1)](
                *arguments, *[constants.get(name, default) for name, default in behind]
            )


def clusters_at_once(
    kernel: Any, size: int, tail_bytes: int, *arguments: Any, **constants: Any
) -> int:
    """How many clusters of such a launch the device holds at a time; it compiles and runs nothing.

    0 where it can hold none.
    """
    with on_device(arguments[0].device):
        return _clustered(kernel, size, tail_bytes, arguments, constants)[2]


def _clustered(
    kernel: Any, size: int, tail_bytes: int, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[Any, list[tuple[str, Any]], int]:
    """The compiled kernel with a cluster's size and the tail in what its launcher reads."""
    from triton.runtime import driver

    key = (size, tail_bytes, kind_of_call(kernel, arguments, constants))
    if key not in _CLUSTERED:
        compiled = on_grid(kernel, (size,), compile_only=True)(*arguments, **constants)
        if compiled is None:  # launches are being recorded
            return None, [], 0
        compiled._init_handles()
        clustered = copy.copy(compiled)
        warps, _, shared = compiled.packed_metadata
        clustered.packed_metadata = (warps, size, shared + tail_bytes)
        if shared <= _UNASKED_BYTES < shared + tail_bytes:
            _allow_shared_bytes(compiled.function, shared + tail_bytes)
        at_once = driver.active.utils.cuOccupancyMaxActiveClusters(
            compiled.function, shared + tail_bytes, size
        )
        parameters = list(kernel.signature.parameters.values())[len(arguments) :]
        _CLUSTERED[key] = clustered, [(p.name, p.default) for p in parameters], at_once
    return _CLUSTERED[key]


def _allow_shared_bytes(function: int, size: int) -> None:
    """Let launches of a function have so many bytes of shared memory.

    Raises:
        RuntimeError: the driver refuses.
    """
    library = ctypes.CDLL("libcuda.so.1")
    code = library.cuFuncSetAttribute(ctypes.c_void_p(function), _MOST_SHARED_BYTES, size)
    if code != 0:
        raise RuntimeError(f"cuFuncSetAttribute returned {code} for {size} bytes of shared memory")
