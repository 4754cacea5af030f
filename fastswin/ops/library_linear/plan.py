"""Descriptors and algorithms of one problem on one GPU, made once and launched many times.

Nothing of this touches the GPU but the launch, so a plan may also be made while a graph is being
captured. A launch sets the pointers (which the library copies into kernel arguments before it
returns) and enqueues; both happen under the plan's lock, since another thread may use the plan.

Scratch memory comes from PyTorch's allocator, per call: on the current stream, so its reuse is
ordered; inside a capture, from the graph's own pool, so it lives as long as the graph. Nobody can
clear it away, unlike the workspace that PyTorch caches per stream (docs/performance.md, traps).
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading

import torch

from fastswin.ops.library_linear.constants import (
    DATA_TYPES,
    EPILOGUES,
    OP_N,
    OP_T,
    REDUCTION_COMPUTE_TYPE,
    SCALE_OUTER_VEC_32F,
    Config,
    HeuristicResult,
    Matmul,
    Preference,
)
from fastswin.ops.library_linear.descriptors import (
    MatmulDescriptor,
    MatrixLayout,
    SearchPreference,
    algorithm_attribute,
)
from fastswin.ops.library_linear.library import (
    SUCCESS,
    LibraryLinearError,
    check,
    handle,
    load_library,
    status_name,
)
from fastswin.ops.library_linear.problem import FP8, Problem

#: Algorithms asked for; the library sorts them by the time it expects.
MAX_ALGORITHMS = 8

#: Most scratch memory an algorithm may want: PyTorch's own limit on Hopper.
MAX_WORKSPACE_BYTES = 32 << 20

#: cublasStatus_t of a search without results.
NOT_SUPPORTED = 15

_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


@dataclasses.dataclass(frozen=True)
class Pointers:
    """Addresses of one call; 0 where there is no tensor.

    Attributes:
        x, weight, out: operands and result.
        bias: ``[N]``.
        residual: added; may be ``out``.
        scale: fp32, ``[1]`` or ``[N]``, multiplies the product.
        row_scale: fp32 ``[M]``, as well.
        output_scale: fp32 ``[1]``, multiplies what is stored.
    """

    x: int
    weight: int
    out: int
    bias: int = 0
    residual: int = 0
    scale: int = 0
    row_scale: int = 0
    output_scale: int = 0


class Plan:
    """Everything about a problem that does not change from call to call.

    Args:
        problem: what is computed.
        device_index: where; must be the current device.
        pointers: of a first call; the search looks at which are given and how they are aligned.

    Raises:
        LibraryLinearError: the library has no algorithm for this.
    """

    def __init__(self, problem: Problem, device_index: int, pointers: Pointers) -> None:
        self.problem = problem
        self.handle = handle(device_index)
        self.device = torch.device("cuda", device_index)
        self.matmul = describe_matmul(problem)
        self.weight = MatrixLayout(problem.dtype, problem.K, problem.N, problem.K)
        self.x = MatrixLayout(problem.dtype, problem.K, problem.M, problem.K)
        self.c = MatrixLayout(problem.c_dtype, problem.N, problem.M, problem.N)
        self.out = MatrixLayout(problem.out_dtype, problem.N, problem.M, problem.N)
        self._lock = threading.Lock()
        self._bound: Pointers | None = None
        self._bind(pointers)
        self.algorithms = self._search()

    def launch(self, pointers: Pointers, stream: int, algorithm: int = 0) -> None:
        """Enqueue the product on a CUDA stream of the current device.

        Args:
            pointers: addresses of this call, aligned at least as the problem says.
            stream: the stream's address.
            algorithm: index into the search's list.

        Raises:
            ValueError: there is no such algorithm.
            LibraryLinearError: the library refuses.
        """
        if not 0 <= algorithm < len(self.algorithms):
            raise ValueError(
                f"config must be below {len(self.algorithms)}, the number of algorithms for "
                f"{self.problem}, got {algorithm}"
            )
        chosen = self.algorithms[algorithm]
        size = chosen.workspace_bytes
        workspace = torch.empty(size, dtype=torch.uint8, device=self.device) if size else None
        beta = _ONE if self.problem.residual else _ZERO
        # without a residual C is not read: the manual's in-place form, none for an fp8 output
        c = pointers.residual or (None if self.problem.out_dtype == FP8 else pointers.out)
        with self._lock:
            self._bind(pointers)
            status = load_library().cublasLtMatmul(
                self.handle, self.matmul.pointer, ctypes.byref(_ONE),
                pointers.weight, self.weight.pointer, pointers.x, self.x.pointer,
                ctypes.byref(beta), c, self.c.pointer, pointers.out, self.out.pointer,
                ctypes.byref(chosen.algorithm),
                None if workspace is None else workspace.data_ptr(), size, stream,
            )  # fmt: skip
        if status != SUCCESS:
            check(status, "cublasLtMatmul", str(self.problem))

    def describe(self, algorithm: int) -> dict[str, int | float | None]:
        """What the library tells about an algorithm, by the header's names."""
        chosen = self.algorithms[algorithm]
        told: dict[str, int | float | None] = {
            "workspace_bytes": chosen.workspace_bytes, "waves": round(chosen.waves, 3),
        }  # fmt: skip
        for name in ("ID", "TILE_ID", "STAGES_ID", "CLUSTER_SHAPE_ID", "SPLITK_NUM"):
            try:
                told[name.lower()] = algorithm_attribute(chosen.algorithm, getattr(Config, name))
            except LibraryLinearError:
                told[name.lower()] = None  # some families of kernels keep it to themselves
        return told

    def _bind(self, pointers: Pointers) -> None:
        """Point the descriptor at a call's vectors and scalars, where they changed."""
        if pointers == self._bound:
            return
        if self.problem.bias_dtype is not None:
            self.matmul.set(Matmul.BIAS_POINTER, pointers.bias)
        if self.problem.scaling != "none":
            self.matmul.set(Matmul.A_SCALE_POINTER, pointers.scale)
        if self.problem.scaling == "channel":
            self.matmul.set(Matmul.B_SCALE_POINTER, pointers.row_scale)
        if self.problem.output_scaled:
            self.matmul.set(Matmul.D_SCALE_POINTER, pointers.output_scale)
        self._bound = pointers

    def _search(self) -> list[HeuristicResult]:
        """The library's algorithms for this problem, those it expects to be fastest first."""
        found = (HeuristicResult * MAX_ALGORITHMS)()
        count = ctypes.c_int()
        preference = describe_preference(self.problem)  # held: it is freed with its object
        status = load_library().cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.matmul.pointer, self.weight.pointer, self.x.pointer, self.c.pointer,
            self.out.pointer, preference.pointer, MAX_ALGORITHMS,
            ctypes.byref(found), ctypes.byref(count),
        )  # fmt: skip
        check(status, "cublasLtMatmulAlgoGetHeuristic", str(self.problem))
        usable = [result for result in found[: count.value] if result.state == SUCCESS]
        if not usable:
            state = found[0].state if count.value else NOT_SUPPORTED
            raise LibraryLinearError(
                f"no algorithm for {self.problem}: {status_name(state)}", state
            )
        return usable


def describe_matmul(problem: Problem) -> MatmulDescriptor:
    """The descriptor of a problem, its pointers still null. Needs no GPU."""
    matmul = MatmulDescriptor()
    matmul.set(Matmul.TRANSA, OP_T)
    matmul.set(Matmul.TRANSB, OP_N)
    matmul.set(Matmul.EPILOGUE, EPILOGUES[problem.gelu, problem.bias_dtype is not None])
    if problem.bias_dtype is not None:
        matmul.set(Matmul.BIAS_DATA_TYPE, DATA_TYPES[problem.bias_dtype])
    if problem.dtype == FP8:
        # adds 1e-3 of relative error beside fp8's 3e-2 and is 1.2 times as fast on an H100
        matmul.set(Matmul.FAST_ACCUM, 1)
    if problem.scaling == "channel":
        matmul.set(Matmul.A_SCALE_MODE, SCALE_OUTER_VEC_32F)
        matmul.set(Matmul.B_SCALE_MODE, SCALE_OUTER_VEC_32F)
    return matmul


def describe_preference(problem: Problem) -> SearchPreference:
    """Limits of the search: scratch memory, alignments, fp32 split-K sums. Needs no GPU."""
    preference = SearchPreference()
    weight, x, c, out, _ = problem.alignments
    preference.set(Preference.MAX_WORKSPACE_BYTES, MAX_WORKSPACE_BYTES)
    preference.set(Preference.REDUCTION_SCHEME_MASK, REDUCTION_COMPUTE_TYPE)
    preference.set(Preference.MIN_ALIGNMENT_A_BYTES, weight)
    preference.set(Preference.MIN_ALIGNMENT_B_BYTES, x)
    preference.set(Preference.MIN_ALIGNMENT_C_BYTES, c)
    preference.set(Preference.MIN_ALIGNMENT_D_BYTES, out)
    return preference
