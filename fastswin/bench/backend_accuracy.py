"""Top-1 of the shipped model on its shipped test images in each CPU runtime.

    python -m fastswin.bench.backend_accuracy --precisions fp32,int8

int8 ranges come from the shipped calibration images (training images, none of them a test image).
A runtime that loses more than 0.3 points against the readable fp32 model is a fault.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fastswin.bench.problems import parse_names
from fastswin.bench.record import (
    DEFAULT_ROOT,
    Document,
    Record,
    make_run_info,
    result_path,
    save_records,
    stamp,
)
from fastswin.bench.suites import measure_device
from fastswin.bench.tables import Table, short_commit
from fastswin.data.fashion_mnist import fashion_mnist_slice
from fastswin.data.shipped import DEFAULT_MODEL
from fastswin.data.source import ModelSource, open_source
from fastswin.engine import Engine
from fastswin.quant import calibrate

SUITE = "backend_accuracy"
PRECISIONS = ("fp32", "bf16", "int8")
BACKENDS = ("onnxruntime", "openvino")

#: Legal loss of top-1, in points.
TOLERANCE = 0.3

#: Images a call of the readable model and of an engine.
BATCH = 64


def evaluate(
    source: ModelSource, precisions: Sequence[str], backends: Sequence[str], limit: int | None
) -> list[Record]:
    """A record of the readable model and of each precision and runtime.

    Args:
        source: the shipped model.
        precisions, backends: of the engine.
        limit: first test images to use; None takes all 2,000.
    """
    pixels, labels = fashion_mnist_slice("test")
    images = source.preprocess(torch.from_numpy(pixels[:limit]))
    truth = torch.from_numpy(labels[:limit]).long()
    with torch.inference_mode():
        expected = torch.cat([source.model(part) for part in images.split(BATCH)])
    records = [_record("fp32", "reference", expected, expected, truth)]
    ranges = None
    if "int8" in precisions:
        seen = source.preprocess(torch.from_numpy(fashion_mnist_slice("calibration")[0]))
        ranges = calibrate(source.model, seen, "int8")
    for precision in precisions:
        for backend in backends:
            engine = Engine(
                source.model, precision, device="cpu", backend=backend,  # type: ignore[arg-type]
                calibration=ranges if precision == "int8" else None,
            )  # fmt: skip
            found = torch.cat([engine(part).float() for part in images.split(BATCH)])
            choice = engine.report().backend
            assert choice is not None
            record = _record(precision, f"fastswin-{backend}", found, expected, truth)
            records.append(record | {"compute": choice.compute})
    return records


def _record(
    dtype: str, variant: str, found: torch.Tensor, expected: torch.Tensor, truth: torch.Tensor
) -> Record:
    def percent(predicted: torch.Tensor, wanted: torch.Tensor) -> float:
        return 100.0 * (predicted.argmax(1) == wanted).float().mean().item()

    return {
        "case": DEFAULT_MODEL,
        "dtype": dtype,
        "batch": BATCH,
        "variant": variant,
        "images": len(truth),
        "top1_percent": percent(found, truth),
        "agreement_percent": percent(found, expected.argmax(1)),
        "max_abs_err": (found - expected).abs().max().item(),
    }


def make_accuracy_table(document: Document) -> Table:
    """One row a precision and runtime, the readable model first."""
    records = sorted(
        document["records"], key=lambda r: (r["variant"] != "reference", r["dtype"], r["variant"])
    )
    header = ("runs in", "precision", "products in", "top-1 %", "agreement %", "max abs diff")
    rows = [
        (
            record["variant"].removeprefix("fastswin-"),
            record["dtype"],
            record.get("compute", record["dtype"]),
            f"{record['top1_percent']:.2f}",
            f"{record['agreement_percent']:.2f}",
            f"{record['max_abs_err']:.1e}",
        )
        for record in records
    ]
    commits = sorted({short_commit(record["commit"]) for record in records})
    caption = (
        f"{document['gpu']}; torch {document['torch']}; commit {', '.join(commits)}; "
        f"{document['created']}. The shipped model on "
        f"{max((r['images'] for r in records), default=0)} test images; agreement and difference "
        "against the readable fp32 model."
    )
    return Table(f"accuracy by runtime on {document['gpu']}", header, tuple(rows), caption)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m fastswin.bench.backend_accuracy",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--precisions", default="fp32,int8", help=f"of {', '.join(PRECISIONS)}")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--limit", type=int, help="first test images only")
    parser.add_argument("--out", type=Path, default=DEFAULT_ROOT, help="root of the records")
    options = parser.parse_args(arguments)
    try:
        precisions = parse_names(options.precisions, PRECISIONS, "--precisions")
        backends = parse_names(options.backends, BACKENDS, "--backends")
        records = evaluate(open_source(DEFAULT_MODEL), precisions, backends, options.limit)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    device = torch.device("cpu")
    ceilings = measure_device(device, [])
    info = make_run_info(SUITE, device, ceilings.copy_tbs, ceilings.gemm_tflops["fp32"])
    path = result_path(options.out, info)
    save_records(path, info, [stamp(info, record) for record in records])
    faults = 0
    for record in records:
        lost = records[0]["top1_percent"] - record["top1_percent"]
        faults += lost > TOLERANCE
        print(
            f"{record['dtype']:5} {record['variant']:22} top-1 {record['top1_percent']:.2f} % "
            f"({-lost:+.2f} points), max abs diff {record['max_abs_err']:.1e}"
        )
    print(f"records: {path}")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
