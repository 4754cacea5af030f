"""Build the whole matrix of TensorRT-RTX engines, as ``make engines`` does; no GPU is needed.

    models      Swin-T, SwinV2-T and the shipped model
    precisions  fp32, fp16, int8 (Q/DQ, the rest fp32)
    targets     sm_86, sm_89 and sm_120, each alone and all in one file
    graphs      folded and unfolded, which must give the same engine layers

Prints one line an engine and writes them as JSON; the engines themselves are dropped unless
``--keep`` names a folder. Swin-T and SwinV2-T have random weights and every calibration sees
random images, which changes neither layers nor sizes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from fastswin.export.onnx import GraphPrecision, export_onnx
from fastswin.export.source import open_model
from fastswin.export.tensorrt import RTX_CAPABILITIES, build_engine
from fastswin.export.tensorrt_report import TensorRtReport
from fastswin.quant.calibrate import calibrate

MODELS = (
    "swin_fashion_mnist", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256",
)  # fmt: skip
PRECISIONS = ("fp32", "fp16", "int8")
TARGETS = (*((c,) for c in RTX_CAPABILITIES), RTX_CAPABILITIES)


def build_model(
    model: str, precision: str, folder: Path, targets: tuple[tuple[int, ...], ...]
) -> tuple[list[tuple[str, TensorRtReport]], list[str]]:
    """Every engine of one model and precision, and what is wrong with them."""
    engines, faults = [], []
    source, _, _ = open_model(model, pretrained=model == MODELS[0])
    calibration = None
    if precision == "int8":
        size = source.config.image_size
        images = torch.randn(2, source.config.in_channels, *size)
        calibration = calibrate(source, images)
    for fold in (True, False):
        graph = folder / f"{model}-{precision}{'' if fold else '-unfolded'}.onnx"
        types: GraphPrecision = "fp16" if precision == "fp16" else "fp32"
        export_onnx(source, graph, precision=types, fold=fold, calibration=calibration, check=False)
        for capabilities in targets if fold else targets[-1:]:
            suffix = "+".join(f"sm{c}" for c in capabilities)
            path = graph.with_name(f"{graph.stem}-{suffix}.engine")
            report = build_engine(graph, path, capabilities=capabilities)
            engines.append((path.stem, report))
            print_line(path.stem, report)
    folded, unfolded = engines[-2][1], engines[-1][1]
    if folded.engine_layers != unfolded.engine_layers:
        faults.append(f"{model} {precision}: folded and unfolded graphs give different layers")
    return engines, faults


def print_line(name: str, report: TensorRtReport) -> None:
    kinds = " ".join(f"{kind} {count}" for kind, count in report.engine_layers.most_common(4))
    print(
        f"{name:64} {report.engine_bytes / 2**20:7.1f} MiB "
        f"{report.network_layers.total():5} -> {report.engine_layers.total():4} layers "
        f"{report.build_seconds:6.1f} s   {kinds}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--together", action="store_true", help="only engines for all targets")
    parser.add_argument("--keep", type=Path, help="folder that the files stay in")
    parser.add_argument("--json", type=Path, help="write the table here")
    arguments = parser.parse_args()
    started = time.perf_counter()
    targets = TARGETS[-1:] if arguments.together else TARGETS
    engines: list[tuple[str, TensorRtReport]] = []
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in arguments.models:
            for precision in arguments.precisions:
                made, wrong = build_model(
                    model, precision, arguments.keep or Path(scratch), targets
                )
                engines += made
                faults += wrong
    print(f"{len(engines)} engines in {time.perf_counter() - started:.0f} s")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({name: report.to_dict() for name, report in engines}, indent=1)
        )
    for fault in faults:
        print(fault, file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
