"""From a model to a TensorRT engine in one call: export, check, build."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from fastswin.export.onnx import export_onnx
from fastswin.export.report import ExportReport
from fastswin.export.source import Source
from fastswin.export.tensorrt import Runtime, build_engine, import_runtime
from fastswin.export.tensorrt_report import TensorRtReport

Pair = tuple[int, int]
EnginePrecision = Literal["fp32", "tf32", "fp16"]


class EngineExport(NamedTuple):
    """Both steps of an export."""

    onnx: ExportReport
    engine: TensorRtReport


def export_tensorrt(
    source: Source,
    path: str | os.PathLike,
    *,
    precision: EnginePrecision = "fp16",
    runtime: Runtime = "tensorrt-rtx",
    plugins: bool = False,
    image_size: int | Pair | None = None,
    features: bool = False,
    fold: bool = True,
    check: bool = True,
    pretrained: bool = True,
    calibration: Any = None,
    keep_onnx: str | os.PathLike | None = None,
    **builder: Any,
) -> EngineExport:
    """Export a model to ONNX, compare it with the model, and build an engine from it.

    Args:
        source: a shipped or published name, a checkpoint's path, or a live model.
        path: the engine file, written whole or not at all.
        precision: types of the graph, which the engine keeps; "tf32" is fp32 with TF32 products.
        runtime: "tensorrt-rtx" or "tensorrt".
        plugins: run attention in our kernels ("tensorrt" alone).
        image_size, features, fold, check, pretrained: as in
            :func:`fastswin.export.onnx.export_onnx`.
        calibration: a :class:`fastswin.quant.ranges.Calibration` of this model: its layers are
            computed in int8 or fp8, and ``precision`` types the rest.
        keep_onnx: where the ONNX file stays; None drops it after the build.
        **builder: further arguments of :func:`fastswin.export.tensorrt.build_engine`.

    Returns:
        What each step wrote. The ONNX report's path is ``keep_onnx``, or no longer there.

    Raises:
        ValueError, ImportError, RuntimeError: as the two steps; a missing runtime is reported
            before anything is exported.
        fastswin.export.ParityError: the graph does not give the model's answers.
    """
    if precision not in get_args(EnginePrecision):
        raise ValueError(f"precision must be one of {get_args(EnginePrecision)}, got {precision!r}")
    if plugins and runtime == "tensorrt-rtx":
        raise ValueError("plugins need runtime='tensorrt'; TensorRT-RTX takes none")
    import_runtime(runtime)
    with tempfile.TemporaryDirectory(prefix="fastswin-") as folder:
        onnx_path = Path(folder, "model.onnx") if keep_onnx is None else Path(keep_onnx)
        exported = export_onnx(
            source, onnx_path, precision="fp32" if precision == "tf32" else precision,
            attention="fastswin" if plugins else "plain", image_size=image_size,
            features=features, fold=fold, check=check, pretrained=pretrained,
            calibration=calibration,
        )  # fmt: skip
        engine = build_engine(onnx_path, path, runtime=runtime, tf32=precision == "tf32", **builder)
    return EngineExport(exported, engine)
