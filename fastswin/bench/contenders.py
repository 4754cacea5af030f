"""The ways to run one model that a user would choose between.

Every contender owns a copy of the same weights in the same dtype and takes the same images. fp32
and tf32 contenders run inside :func:`~fastswin.bench.precision.fp32_scope`; the engine does not:
it has to keep its own precision under whatever flags its user's process has.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fastswin.bench.built import Built as _Built
from fastswin.bench.built import Forward
from fastswin.bench.calibration import calibration_for
from fastswin.bench.failures import UnavailableError
from fastswin.bench.memory import held_mib
from fastswin.bench.precision import fp32_scope
from fastswin.bench.problems import Problem
from fastswin.bench.runtimes import (
    export_builder,
    onnxruntime_builder,
    openvino_builder,
    tensorrt_builder,
)
from fastswin.bench.source import Source
from fastswin.engine.library_workspace import library_workspace_in_pool

#: Calls before capture: cuBLAS and cuDNN set up their workspaces on the first ones.
CAPTURE_WARMUP_CALLS = 3


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to run the model, ready to call.

    Attributes:
        variant: key of :data:`VARIANTS`.
        forward: images ``[B, channels, h, w]`` to logits ``[B, classes]``, which the next call may
            overwrite.
        graph: whether it replays CUDA graphs.
        tf32: whether its fp32 products run in TF32.
        build_s: seconds to build, compile, capture and answer the first call.
        held_before_mib: device memory in use before it was built.
        scope: context that each call runs in.
        keep: whatever must outlive ``forward`` (a captured graph's weights).
        notes: fields for the record, such as the runtime's version.
    """

    variant: str
    forward: Forward
    graph: bool
    tf32: bool
    build_s: float
    held_before_mib: float
    scope: Callable[[], contextlib.AbstractContextManager[None]]
    keep: object = None
    notes: dict[str, str] = dataclasses.field(default_factory=dict)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """Answer in fp32, cloned: graph outputs are overwritten by the next call."""
        with self.scope():
            return self.forward(images).clone().float()


def build_contender(
    variant: str, source: Source, problem: Problem, images: torch.Tensor
) -> Contender:
    """Build one contender and run it once.

    Args:
        variant: key of :data:`VARIANTS`.
        source: the model.
        problem: precision and batch.
        images: ``[batch, channels, h, w]`` on the target device in the problem's dtype.

    Raises:
        ValueError: unknown ``variant``.
        UnavailableError: its library, device or precision is absent; the message is the reason.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
    if problem.tf32 and not images.is_cuda:
        raise UnavailableError("tf32 is a mode of NVIDIA GPUs; on a CPU it would be fp32 again")
    held = held_mib()
    scope: Callable[[], contextlib.AbstractContextManager[None]]
    if variant.startswith("fastswin"):
        scope = contextlib.nullcontext
    else:
        scope = functools.partial(_torch_scope, problem.tf32)
    start = time.perf_counter()
    with scope():
        built = VARIANTS[variant](source, problem, images)
        built.forward(images)
        if images.is_cuda:
            torch.cuda.synchronize()
    build_s = time.perf_counter() - start
    return Contender(
        variant, built.forward, built.graph, problem.tf32, build_s, held, scope, built.keep,
        built.notes,
    )  # fmt: skip


def model_for(source: Source, problem: Problem, device: torch.device) -> nn.Module:
    """A copy of the source model in the problem's dtype.

    Raises:
        UnavailableError: a quantised precision, which a float model has no form of.
    """
    if problem.quantized:
        raise UnavailableError(f"PyTorch has no {problem.dtype} form of this model")
    return copy.deepcopy(source.model).to(device, problem.torch_dtype)


@contextlib.contextmanager
def _torch_scope(tf32: bool) -> Iterator[None]:
    with fp32_scope(tf32=tf32), torch.inference_mode():
        yield


def _fastswin(
    source: Source,
    problem: Problem,
    images: torch.Tensor,
    backend: Any = "auto",
    mix: Any = "auto",
) -> _Built:
    try:
        from fastswin.engine import Engine
    except ImportError as error:
        raise UnavailableError(f"fastswin.engine cannot be imported: {error}") from error
    precision: Any = problem.dtype  # its legal values are those of the engine
    quantized: dict[str, Any] = {}
    if problem.quantized:
        quantized = {"calibration": calibration_for(source, problem, images.device), "mix": mix}
    engine = Engine(
        source.engine_source, precision=precision, device=images.device, backend=backend,
        **quantized,
    )  # fmt: skip
    notes = {}
    if problem.quantized or images.is_cuda:
        engine(images)  # places the weights that its plan asks for
        report = engine.report(len(images), problem.swin_config.image_size)
        notes["weights_mib"] = f"{report.weights_mib:.1f}"
        if problem.quantized:
            notes |= {"mix": mix, "quantized_layers": report.quantized_layers}
    if not images.is_cuda:
        choice = engine.report().backend
        assert choice is not None
        notes |= {"backend": choice.backend, "compute": choice.compute, "reason": choice.reason}
    return _Built(engine, graph=images.is_cuda, notes=notes)


def _engine_on(backend: str) -> Callable[[Source, Problem, torch.Tensor], _Built]:
    """Builder of the engine on one CPU runtime."""

    def build(source: Source, problem: Problem, images: torch.Tensor) -> _Built:
        if images.is_cuda:
            raise UnavailableError(f"backend {backend!r} is for CPUs")
        from fastswin.engine.backends.choose import why_not_backend

        if reason := why_not_backend(backend, problem.dtype):
            raise UnavailableError(reason)
        return _fastswin(source, problem, images, backend)

    return build


def _fastswin_scheme(source: Source, problem: Problem, images: torch.Tensor) -> _Built:
    """The engine with every layer quantised that the scheme quantises."""
    if not problem.quantized:
        raise UnavailableError(f"{problem.dtype} has no scheme")
    return _fastswin(source, problem, images, mix="scheme")


def _eager(source: Source, problem: Problem, images: torch.Tensor) -> _Built:
    return _Built(model_for(source, problem, images.device))


def _jit_trace(source: Source, problem: Problem, images: torch.Tensor) -> _Built:
    model = model_for(source, problem, images.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # shapes are fixed here, and later releases deprecate it
        traced = torch.jit.trace(model, images, check_trace=False)
    return _Built(traced)


def _eager_graph(source: Source, problem: Problem, images: torch.Tensor) -> _Built:
    _need_gpu(images, "CUDA graphs")
    model = model_for(source, problem, images.device)
    static_images = images.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(CAPTURE_WARMUP_CALLS):
            model(static_images)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with library_workspace_in_pool(), torch.cuda.graph(graph):
        static_logits = model(static_images)

    def forward(new_images: torch.Tensor) -> torch.Tensor:
        static_images.copy_(new_images)
        graph.replay()
        return static_logits

    # the graph holds addresses, not references: freed weights would be read all the same
    return _Built(forward, graph=True, keep=model)


def _compile(source: Source, problem: Problem, images: torch.Tensor) -> _Built:
    if not images.is_cuda and not any(shutil.which(c) for c in ("g++", "c++", "clang++")):
        raise UnavailableError("torch.compile on a CPU needs a C++ compiler, none is on the PATH")
    model = model_for(source, problem, images.device)
    return _Built(torch.compile(model, dynamic=False))


def _compile_reduce_overhead(source: Source, problem: Problem, images: torch.Tensor) -> _Built:
    _need_gpu(images, "mode='reduce-overhead' (CUDA graphs)")
    model = model_for(source, problem, images.device)
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)

    def forward(new_images: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(new_images)

    # the first call compiles, the second warms the graph's memory pool, the third captures
    for _ in range(CAPTURE_WARMUP_CALLS):
        forward(images)
    return _Built(forward, graph=True)


def _need_gpu(images: torch.Tensor, what: str) -> None:
    if not images.is_cuda:
        raise UnavailableError(f"{what} need a GPU, the images are on {images.device}")


#: Builder of each variant, in the order in which tables show them.
VARIANTS: dict[str, Callable[[Source, Problem, torch.Tensor], _Built]] = {
    "fastswin": _fastswin,
    "eager": _eager,
    "jit-trace": _jit_trace,
    "eager-graph": _eager_graph,
    "compile": _compile,
    "compile-reduce-overhead": _compile_reduce_overhead,
    "onnxruntime": onnxruntime_builder(folded=True),
    "onnxruntime-unfolded": onnxruntime_builder(folded=False),
    "openvino": openvino_builder(folded=True),
    "openvino-unfolded": openvino_builder(folded=False),
    "tensorrt": tensorrt_builder(folded=True),
    "tensorrt-unfolded": tensorrt_builder(folded=False),
    "fastswin-onnx": export_builder(folded=True),
    "fastswin-onnx-unfolded": export_builder(folded=False),
    "fastswin-openvino": _engine_on("openvino"),
    "fastswin-onnxruntime": _engine_on("onnxruntime"),
    "fastswin-scheme": _fastswin_scheme,
}

#: Variants that run where none are named; the rest, slow to build, belong to ``--backends``.
DEFAULT_VARIANTS = (
    "fastswin", "eager", "jit-trace", "eager-graph", "compile", "compile-reduce-overhead",
)  # fmt: skip

#: Variants whose build time is a compilation that an on-disk cache can shorten.
COMPILED = ("compile", "compile-reduce-overhead")
