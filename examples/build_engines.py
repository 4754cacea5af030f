"""Build the whole matrix of TensorRT-RTX engines, as ``make engines`` does; no GPU is needed.

    models      Swin-T, SwinV2-T and the shipped model
    precisions  fp32, fp16, int8 (Q/DQ, the rest fp32)
    targets     sm_86, sm_89 and sm_120, each alone and all in one file
    graphs      folded and unfolded, which must give the same engine layers

Prints one line an engine and writes ``benchmarks/results/<cpu>/tensorrt_rtx.json`` as it goes; the
engines themselves are dropped unless ``--keep`` names a folder. Swin-T and SwinV2-T have random
weights and every calibration sees random images, which changes neither layers nor sizes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fastswin.bench.record import (
    DEFAULT_ROOT,
    Record,
    RunInfo,
    make_run_info,
    result_path,
    save_records,
    stamp,
)
from fastswin.bench.suites import measure_device
from fastswin.export.onnx import GraphPrecision, export_onnx
from fastswin.export.source import open_model
from fastswin.export.tensorrt import RTX_CAPABILITIES, build_engine
from fastswin.export.tensorrt_report import TensorRtReport
from fastswin.quant.calibrate import calibrate

SUITE = "tensorrt_rtx"

MODELS = (
    "swin_fashion_mnist", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256",
)  # fmt: skip
PRECISIONS = ("fp32", "fp16", "int8")
TARGETS = (*((c,) for c in RTX_CAPABILITIES), RTX_CAPABILITIES)

Keep = Callable[[Record], None]


def build_model(
    model: str, precision: str, folder: Path, targets: tuple[tuple[int, ...], ...], keep: Keep
) -> list[str]:
    """Build every engine of one model and precision.

    Args:
        model: a name.
        precision: of :data:`PRECISIONS`.
        folder: for graphs and engines.
        targets: compute capabilities of each engine; the unfolded graph is built for the last.
        keep: receives the record of each engine.

    Returns:
        What is wrong with them, one line each.
    """
    source, _, _ = open_model(model, pretrained=model == MODELS[0])
    calibration = None
    if precision == "int8":
        images = torch.randn(2, source.config.in_channels, *source.config.image_size)
        calibration = calibrate(source, images)
    reports = []
    for fold in (True, False):
        graph = folder / f"{model}-{precision}{'' if fold else '-unfolded'}.onnx"
        types: GraphPrecision = "fp16" if precision == "fp16" else "fp32"
        exported = export_onnx(
            source, graph, precision=types, fold=fold, calibration=calibration, check=False
        )
        for capabilities in targets if fold else targets[-1:]:
            suffix = "+".join(f"sm{c}" for c in capabilities)
            path = graph.with_name(f"{graph.stem}-{suffix}.engine")
            reports.append(build_engine(graph, path, capabilities=capabilities))
            print_line(path.stem, reports[-1])
            described = describe(model, precision, reports[-1], fold=fold)
            keep(described | {"graph_nodes": exported.node_count})
    if reports[-2].engine_layers != reports[-1].engine_layers:
        return [f"{model} {precision}: folded and unfolded graphs give different layers"]
    return []


def describe(model: str, precision: str, report: TensorRtReport, *, fold: bool) -> Record:
    """The record of one engine; its batch is the one that tactics were chosen for."""
    assert report.batches is not None
    targets = "+".join(f"sm{c}" for c in report.capabilities)
    values = report.to_dict()
    return {
        "case": model,
        "dtype": precision,
        "batch": report.batches.usual,
        "variant": targets if fold else f"{targets}-unfolded",
        "folded": fold,
        "parse_s": report.parse_seconds,
        "build_s": report.build_seconds,
        **{
            key: values[key]
            for key in (
                "runtime",
                "capabilities",
                "engine_bytes",
                "network_layers",
                "engine_layers",
            )
        },
    }


def print_line(name: str, report: TensorRtReport) -> None:
    kinds = " ".join(f"{kind} {count}" for kind, count in report.engine_layers.most_common(4))
    print(
        f"{name:64} {report.engine_bytes / 2**20:7.1f} MiB "
        f"{report.network_layers.total():5} -> {report.engine_layers.total():4} layers "
        f"{report.build_seconds:6.1f} s   {kinds}",
        flush=True,
    )


def run_info() -> RunInfo:
    """What the records share; no card is involved, the processor compiles."""
    device = torch.device("cpu")
    ceilings = measure_device(device, [])
    return make_run_info(SUITE, device, ceilings.copy_tbs, ceilings.gemm_tflops["fp32"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--together", action="store_true", help="only engines for all targets")
    parser.add_argument("--keep", type=Path, help="folder that the files stay in")
    parser.add_argument("--out", type=Path, default=DEFAULT_ROOT, help="root of the records")
    arguments = parser.parse_args()
    started = time.perf_counter()
    targets = TARGETS[-1:] if arguments.together else TARGETS
    info = run_info()
    path = result_path(arguments.out, info)
    count, faults = 0, []

    def keep(record: Record) -> None:
        nonlocal count
        count += 1
        save_records(path, info, [stamp(info, record)])

    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        for model in arguments.models:
            for precision in arguments.precisions:
                faults += build_model(model, precision, folder, targets, keep)
    print(f"{count} engines in {time.perf_counter() - started:.0f} s; records: {path}")
    for fault in faults:
        print(fault, file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
