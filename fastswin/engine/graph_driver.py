"""What the CUDA driver says of a captured graph's nodes, and takes for an instantiated one.

Through ctypes: PyTorch hands out a graph's handles but does not look into it. Structures are as in
cuda.h of CUDA 12.4, which is the first that tells where a kernel's parameters lie, and later.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

#: CUgraphNodeType: nodes that run kernels, copy and fill; those that touch no memory of ours.
KERNEL, MEMCPY, MEMSET = 0, 1, 2
SILENT_NODES = {5: "empty", 6: "event wait", 7: "event record"}

#: Keys of a list that gives a kernel all of its arguments in one buffer, as libraries do.
_END, _BUFFER, _BUFFER_BYTES = 0, 1, 2

_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE: what lies behind a kernel's last parameter

#: CUDA_MEMCPY3D_v2 and CUDA_MEMSET_NODE_PARAMS in words of 8 bytes: addresses are whole words.
_FILL_WORDS = {MEMCPY: 25, MEMSET: 5}

_SIGNATURES = {
    "cuGraphGetNodes": (c_void_p, POINTER(c_void_p), POINTER(c_size_t)),
    "cuGraphNodeGetType": (c_void_p, POINTER(c_int)),
    "cuGraphKernelNodeGetParams_v2": (c_void_p, c_void_p),
    "cuGraphExecKernelNodeSetParams_v2": (c_void_p, c_void_p, c_void_p),
    "cuGraphMemcpyNodeGetParams": (c_void_p, c_void_p),
    "cuGraphMemsetNodeGetParams": (c_void_p, c_void_p),
    "cuFuncGetParamInfo": (c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)),
    "cuKernelGetParamInfo": (c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)),
}


class DriverError(RuntimeError):
    """A call that the driver refused; the message names it and the code."""


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2: what a kernel node runs, where, and with which arguments.

    Cluster size, priority and the like are attributes of the node, programmatic dependence one of
    its edges: neither is in here, and setting this changes neither.
    """

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("values", POINTER(c_void_p)),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


class Driver:
    """Calls of libcuda on graphs.

    Raises:
        AttributeError: the library lacks one of them.
    """

    def __init__(self, library: Any) -> None:
        self._calls: dict[str, Any] = {}
        for name, types in _SIGNATURES.items():
            call = getattr(library, name)
            call.argtypes, call.restype = types, c_int
            self._calls[name] = call

    def _ask(self, name: str, *arguments: Any) -> None:
        code = self._calls[name](*arguments)
        if code != 0:
            raise DriverError(f"{name} returned CUDA error {code}")

    def nodes(self, graph: int) -> list[int]:
        """Handles of a graph's nodes."""
        count = c_size_t()
        self._ask("cuGraphGetNodes", graph, None, byref(count))
        found = (c_void_p * count.value)()
        self._ask("cuGraphGetNodes", graph, found, byref(count))
        return [handle for handle in found if handle is not None]

    def node_type(self, node: int) -> int:
        """CUgraphNodeType of a node."""
        found = c_int()
        self._ask("cuGraphNodeGetType", node, byref(found))
        return found.value

    def fill_words(self, node: int, node_type: int) -> list[int]:
        """Every word that says what a memcpy or memset node does."""
        words = (c_uint64 * _FILL_WORDS[node_type])()
        name = "cuGraphMemcpyNodeGetParams"
        if node_type == MEMSET:
            name = "cuGraphMemsetNodeGetParams"
        self._ask(name, node, byref(words))
        return list(words)

    def kernel(self, node: int) -> KernelParams:
        """What a kernel node runs; the arguments it points to are the node's."""
        params = KernelParams()
        self._ask("cuGraphKernelNodeGetParams_v2", node, byref(params))
        return params

    def arguments(self, params: KernelParams) -> list[bytes]:
        """A kernel's arguments, or the one buffer of all if they are packed."""
        if params.extra:
            return [self._packed(params.extra)]
        sizes = self.sizes(params)
        return [ctypes.string_at(params.values[i], size) for i, size in enumerate(sizes)]

    @staticmethod
    def _packed(extra: int) -> bytes:
        found: dict[int, int] = {}
        entries = ctypes.cast(extra, POINTER(c_void_p))
        at = 0
        while (key := entries[at] or _END) != _END:
            if key not in (_BUFFER, _BUFFER_BYTES):
                raise DriverError(f"arguments are given by key {key}, which is not known")
            found[key] = entries[at + 1] or 0
            at += 2
        if found.keys() != {_BUFFER, _BUFFER_BYTES}:
            raise DriverError("packed arguments without a buffer or its size")
        return ctypes.string_at(found[_BUFFER], c_size_t.from_address(found[_BUFFER_BYTES]).value)

    def sizes(self, params: KernelParams) -> list[int]:
        """Bytes of each of a kernel's parameters."""
        name, handle = "cuFuncGetParamInfo", params.function
        if handle is None:
            name, handle = "cuKernelGetParamInfo", params.kernel
        sizes: list[int] = []
        offset, size = c_size_t(), c_size_t()
        while True:
            code = self._calls[name](handle, len(sizes), byref(offset), byref(size))
            if code == _INVALID_VALUE:
                return sizes
            if code != 0:
                raise DriverError(f"{name} returned CUDA error {code}")
            sizes.append(size.value)

    def setter(self, executable: int, node: int, params: KernelParams) -> functools.partial[int]:
        """A call that gives an instantiated graph's node ``params`` as they then are.

        It returns a CUDA error code. Later launches see the change; those already enqueued or
        running do not, nor does the node of the graph that was instantiated (CUDA driver API,
        cuGraphExecKernelNodeSetParams).
        """
        return functools.partial(
            self._calls["cuGraphExecKernelNodeSetParams_v2"],
            c_void_p(executable), c_void_p(node), byref(params),
        )  # fmt: skip


def packed_list(buffer: int, size: c_size_t) -> ctypes.Array[c_void_p]:
    """The list that gives a kernel its arguments in one buffer, for ``KernelParams.extra``."""
    return (c_void_p * 5)(_BUFFER, buffer, _BUFFER_BYTES, ctypes.addressof(size), _END)


@functools.cache
def load_driver() -> Driver:
    """The driver of this process.

    Raises:
        OSError: there is none.
        AttributeError: it is older than CUDA 12.4.
    """
    return Driver(ctypes.CDLL("libcuda.so.1"))
