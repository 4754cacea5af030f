"""Accuracy of every precision of the shipped model, and of the same model with outliers.

Calibrates on the 512 shipped training images, evaluates on the shipped slice or, with ``--data``,
on all 10,000 test images, and writes one JSON record that docs/quantization.md shows:

    python examples/quantize_fashion.py                                  # shipped slice, CPU
    python examples/quantize_fashion.py --data FOLDER --device cuda \\
        --precision fp32,fp16,int8,int8_mode1,int8_mode2,fp8 --qat qat-run/*/swin_qat.safetensors
    python examples/quantize_fashion.py --tables                         # records to the document

The outliers are those of :mod:`fastswin.testing.outliers`: no answer changes in fp32, but fc2 and
merging write far larger values, which per-tensor 8-bit outputs cannot hold.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fastswin.bench.record import card_slug, device_name
from fastswin.data.atomic import write_text
from fastswin.data.fashion_mnist import PREPROCESS, fashion_mnist_slice, load_split
from fastswin.data.source import open_source
from fastswin.evaluation import ReferenceModel, Score, evaluate, evaluate_precisions
from fastswin.models import SwinTransformer
from fastswin.quant import PRESETS, QuantizedSwin, calibration_of, load_quantized, observe
from fastswin.testing.outliers import add_outliers

REPOSITORY = Path(__file__).parents[1]
RECORDS = REPOSITORY / "benchmarks" / "accuracy"
DOCUMENT = REPOSITORY / "docs" / "quantization.md"
BEGIN, END = "<!-- accuracy:begin -->\n", "<!-- accuracy:end -->"


def batches(
    images: torch.Tensor, labels: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for part, truth in zip(images.split(64), labels.split(64), strict=True):
        yield PREPROCESS(part), truth.long()


def score(
    name: str,
    model: SwinTransformer,
    options: argparse.Namespace,
    calibrations: dict[str, Any],
    teacher: SwinTransformer | None = None,
) -> dict[str, Any]:
    """One table: every precision that was asked for, beside the model or its teacher in fp32."""
    if options.data is None:
        pixels, labels = fashion_mnist_slice("test")
    else:
        pixels, labels = load_split(options.data, "test")
    limit = options.stress_limit if name == "outliers" else options.limit
    images, truth = torch.from_numpy(pixels[:limit]), torch.from_numpy(labels[:limit])
    precisions = [p for p in options.precision.split(",") if p not in PRESETS or p in calibrations]
    stream = batches(images.to(options.device), truth)
    found: dict[str, Score]
    if teacher is None:
        found = evaluate_precisions(
            model, precisions, stream, device=options.device, calibrations=calibrations
        )
    else:
        quantized = {
            key: QuantizedSwin(model.to(options.device), c) for key, c in calibrations.items()
        }
        reference = ReferenceModel(teacher, options.device)
        found = evaluate(quantized, reference, stream, device=options.device)
    rows = {key: value.to_dict() for key, value in found.items()}
    print(name, {key: row["top1_percent"] for key, row in rows.items()}, flush=True)
    return {"case": name, "images": len(images), "scores": rows}


def calibrate_all(model: SwinTransformer, device: str) -> dict[str, Any]:
    pixels = torch.from_numpy(fashion_mnist_slice("calibration")[0])
    seen = observe(model.to(device), (PREPROCESS(part.to(device)) for part in pixels.split(64)))
    return {name: calibration_of(model, seen, name) for name in PRESETS}


def run(options: argparse.Namespace) -> Path:
    shipped = open_source("swin_fashion_mnist").model
    cases = [score("post-training", shipped, options, calibrate_all(shipped, options.device))]
    for path in options.qat:
        trained = load_quantized(path)
        case = score("trained", trained.model, options, trained.calibrations, shipped)
        if cases[-1]["case"] == "trained":  # one table of all checkpoints
            cases[-1]["scores"] |= case["scores"]
        else:
            cases.append(case)
    stressed = copy.deepcopy(shipped).cpu()
    add_outliers(stressed)
    cases.append(score("outliers", stressed, options, calibrate_all(stressed, options.device)))
    device = torch.device(options.device)
    record = {
        "data": "Fashion-MNIST test images",
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cases": cases,
    }
    path = options.out / f"{card_slug(device_name(device))}.json"
    write_text(path, json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}")
    return path


_TITLES = {
    "post-training": "Post-training: calibrated on 512 training images",
    "trained": "Trained with quantisation in the loop (`examples/qat.py`)",
    "outliers": "Post-training, weights with outliers and the same fp32 answers",
}


def tables(records: Path) -> str:
    """Markdown of all records."""
    parts = []
    for path in sorted(records.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        for case in record["cases"]:
            fp32 = case["scores"]["reference"]["top1_percent"]
            lines = [
                f"**{_TITLES[case['case']]}**, {case['images']:,} test images, {record['device']}:",
                "",
                "| precision | top-1 % | change, points | top-5 % | agreement with fp32 % |",
                "|---|---|---|---|---|",
            ]
            for name, row in case["scores"].items():
                lines.append(
                    f"| {'fp32 reference' if name == 'reference' else name} "
                    f"| {row['top1_percent']:.2f} | {row['top1_percent'] - fp32:+.2f} "
                    f"| {row['top5_percent']:.2f} | {row['agreement_percent']:.2f} |"
                )
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n" if parts else "No records yet.\n"


def render(text: str, records: Path | None = None) -> str:
    """A document with its table block regenerated."""
    head, found, rest = text.partition(BEGIN)
    if not found or END not in rest:
        raise SystemExit(f"the document lacks {BEGIN.strip()} or {END}")
    return head + BEGIN + tables(records or RECORDS) + END + rest.partition(END)[2]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, help="folder of the four IDX files; default: the shipped slice")
    add("--device", default="cpu")
    add("--precision", default="int8,int8_mode1,int8_mode2,fp8")
    add("--limit", type=int, help="first test images only")
    add("--stress-limit", type=int, help="the same for the model with outliers")
    add("--qat", type=Path, nargs="*", default=[], help="checkpoints of examples/qat.py")
    add("--out", type=Path, default=RECORDS)
    add("--tables", action="store_true", help="write the records into the document and stop")
    options = parser.parse_args(arguments)
    if not options.tables:
        run(options)
    text = DOCUMENT.read_text(encoding="utf-8")
    write_text(DOCUMENT, render(text))


if __name__ == "__main__":
    main()
