"""Other runtimes as contenders: plain exports of the source model, and files of our own export.

    onnxruntime         torch.onnx.export of the framework's model, folded, in ONNX Runtime
    openvino            openvino.convert_model of the framework's model
    fastswin-onnx       fastswin.export.export_onnx, folded, in ONNX Runtime
    tensorrt            the same file, built by TensorRT
    ...-unfolded        the exporter's constant folding off, and the runtime's where it has a switch

The first two are what a user does without this package. OpenVINO folds constants in any case; its
unfolded row reads the unfolded ONNX file. On the CPU, for fp32; OpenVINO also for bf16.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastswin.bench.built import Built
from fastswin.bench.failures import UnavailableError
from fastswin.bench.problems import Problem
from fastswin.bench.source import Source

Builder = Callable[[Source, Problem, torch.Tensor], Built]


def onnxruntime_builder(*, folded: bool) -> Builder:
    """Builder of the plain export in ONNX Runtime."""

    def build(source: Source, problem: Problem, images: torch.Tensor) -> Built:
        _need_cpu(images, "onnxruntime")
        _need_dtype(problem, ("fp32",), "ONNX Runtime's CPU kernels")
        with tempfile.TemporaryDirectory() as folder:
            path = _plain_onnx(source, problem, Path(folder), folded=folded)
            return _onnx_session(path, folded)

    return build


def openvino_builder(*, folded: bool) -> Builder:
    """Builder of the plain export in OpenVINO."""

    def build(source: Source, problem: Problem, images: torch.Tensor) -> Built:
        openvino = _load("openvino", "openvino")
        _need_cpu(images, "openvino")
        _need_dtype(problem, ("fp32", "bf16"), "OpenVINO's CPU kernels")
        core = openvino.Core()
        capabilities = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if problem.dtype == "bf16" and "BF16" not in capabilities:
            raise UnavailableError("this CPU has no bf16 products")
        with tempfile.TemporaryDirectory() as folder, _quiet():
            if folded:
                example = images.float()
                shape = list(images.shape)
                model = openvino.convert_model(source.model, example_input=example, input=shape)
            else:
                model = core.read_model(_plain_onnx(source, problem, Path(folder), folded=False))
            properties = {
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": torch.get_num_threads(),
                "INFERENCE_PRECISION_HINT": "bf16" if problem.dtype == "bf16" else "f32",
            }
            compiled = core.compile_model(model, "CPU", properties)
        request = compiled.create_infer_request()

        def forward(new_images: torch.Tensor) -> torch.Tensor:
            pixels = new_images.float().contiguous().numpy()
            request.set_input_tensor(openvino.Tensor(pixels, shared_memory=True))
            request.infer()
            return torch.from_numpy(request.get_output_tensor(0).data)

        return Built(forward, notes={"runtime": f"OpenVINO {openvino.__version__}"})

    return build


def export_builder(*, folded: bool) -> Builder:
    """Builder of our own export in ONNX Runtime."""

    def build(source: Source, problem: Problem, images: torch.Tensor) -> Built:
        _need_cpu(images, "onnxruntime")
        _need_dtype(problem, ("fp32",), "ONNX Runtime's CPU kernels")
        with tempfile.TemporaryDirectory() as folder:
            path = _our_onnx(source, Path(folder), problem, folded)
            return _onnx_session(path, folded)

    return build


def tensorrt_builder(*, folded: bool) -> Builder:
    """Builder of our own export in TensorRT, on a GPU that has it installed."""

    def build(source: Source, problem: Problem, images: torch.Tensor) -> Built:
        if not images.is_cuda:
            raise UnavailableError("TensorRT needs a GPU")
        _need_dtype(problem, ("fp32", "tf32", "fp16"), "this export")
        from fastswin.export.tensorrt import build_engine, import_runtime
        from fastswin.export.tensorrt_report import BatchRange

        try:
            trt = import_runtime("tensorrt")
        except ImportError as error:
            raise UnavailableError(str(error)) from error
        batches = BatchRange(problem.batch, problem.batch, problem.batch)
        with tempfile.TemporaryDirectory() as folder:
            path = _our_onnx(source, Path(folder), problem, folded)
            plan = Path(folder) / "model.engine"
            build_engine(path, plan, runtime="tensorrt", batches=batches, tf32=problem.tf32)
            runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
            engine = runtime.deserialize_cuda_engine(plan.read_bytes())
        context = engine.create_execution_context()
        name_in, name_out = (engine.get_tensor_name(i) for i in range(2))
        context.set_input_shape(name_in, tuple(images.shape))
        logits = torch.empty(
            tuple(context.get_tensor_shape(name_out)), device=images.device, dtype=torch.float32
        )
        context.set_tensor_address(name_out, logits.data_ptr())

        def forward(new_images: torch.Tensor) -> torch.Tensor:
            pixels = new_images.float().contiguous()
            context.set_tensor_address(name_in, pixels.data_ptr())
            context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
            return logits

        notes = {"runtime": f"TensorRT {trt.__version__}"}
        return Built(forward, keep=(runtime, engine), notes=notes)

    return build


def _onnx_session(path: Path, folded: bool) -> Built:
    onnxruntime = _load("onnxruntime", "onnxruntime")
    from fastswin.export.parity import open_session

    session = open_session(path, folded=folded)
    name = session.get_inputs()[0].name

    def forward(images: torch.Tensor) -> torch.Tensor:
        pixels: np.ndarray = images.float().contiguous().numpy()
        return torch.from_numpy(session.run(None, {name: pixels})[0])

    return Built(forward, notes={"runtime": f"ONNX Runtime {onnxruntime.__version__}"})


def _plain_onnx(source: Source, problem: Problem, folder: Path, *, folded: bool) -> Path:
    """What ``torch.onnx.export`` makes of the framework's model at this batch."""
    _load("onnxscript", "export")
    path = folder / "plain.onnx"
    images = torch.zeros(problem.batch, problem.swin_config.in_channels, *_size(problem))
    with _quiet():
        torch.onnx.export(
            source.model, (images,), str(path), dynamo=True, optimize=folded, verbose=False
        )
    return path


def _our_onnx(source: Source, folder: Path, problem: Problem, folded: bool) -> Path:
    _load("onnxscript", "export")
    from fastswin.export.onnx import export_onnx

    path = folder / "fastswin.onnx"
    half = problem.dtype == "fp16"
    with _quiet():  # checked by the benchmark's own gate
        export_onnx(
            source.engine_source, path, fold=folded, check=False, image_size=_size(problem),
            precision="fp16" if half else "fp32",
        )  # fmt: skip
    return path


def _size(problem: Problem) -> tuple[int, int]:
    return problem.swin_config.image_size


def _load(module: str, extra: str) -> Any:
    try:
        return __import__(module)
    except ImportError:
        raise UnavailableError(
            f"{module} is not installed: pip install 'fastswin[{extra}]'"
        ) from None


def _need_cpu(images: torch.Tensor, name: str) -> None:
    if images.is_cuda:
        raise UnavailableError(f"{name} is measured on CPUs, the images are on {images.device}")


def _need_dtype(problem: Problem, legal: tuple[str, ...], who: str) -> None:
    if problem.dtype not in legal:
        raise UnavailableError(f"{who} run {', '.join(legal)} here, not {problem.dtype}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Exporters print and warn about what is no concern of a benchmark's."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield
