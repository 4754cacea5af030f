"""Classify, compare, time, write: the demonstration as one function.

    shipped weights + shipped images -> predictions
    engine against the readable fp32 model on the 2,000-image slice -> parity and accuracy
    engine against other ways to run the model -> latency
    report.json, report.png

The images shown are the first of the test set, right or wrong.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import fastswin
from fastswin.bench.record import device_name
from fastswin.classification import top_guesses
from fastswin.data.atomic import write_text
from fastswin.data.fashion_mnist import fashion_mnist_slice
from fastswin.data.shipped import DEFAULT_MODEL
from fastswin.data.source import ModelSource, open_source
from fastswin.data.test_set import Batch, shipped_test_set
from fastswin.demo.figure import draw_report, why_no_figure
from fastswin.demo.latency import measure_latency, red_rows
from fastswin.doctor import default_precisions
from fastswin.engine import Engine
from fastswin.evaluation import REFERENCE, evaluate_precisions, failed_gates

SHOWN_IMAGES = 12

#: A CPU is done within about two minutes: seconds for the comparison and for both parts.
CPU_COMPARISON_S, CPU_DEADLINE_S = 45.0, 110.0

EVALUATION_BATCH = 50


def run_demo(
    out: str | Path = "fastswin-demo",
    device: torch.device | str = "cpu",
    *,
    say: Callable[[str], None] = lambda line: None,
    on_batch: Callable[[int], None] | None = None,
    limit: int | None = None,
    latency: bool = True,
) -> dict[str, Any]:
    """Run the demonstration and write its report.

    Args:
        out: folder for ``report.json`` and ``report.png``.
        device: where to run.
        say: receives one readable line a stage.
        on_batch: called with the number of images after each evaluated batch.
        limit: evaluate on the first images only.
        latency: whether to time contenders.

    Returns:
        What ``report.json`` holds: ``predictions``, ``backend``, ``parity``, ``latency``,
        ``failures`` and what they were measured with.

    Raises:
        FileNotFoundError: the shipped weights are missing.
        OSError: ``out`` cannot be written; nothing is run then.
    """
    started = time.monotonic()
    out, device = Path(out), torch.device(device)
    out.mkdir(parents=True, exist_ok=True)
    source = open_source(DEFAULT_MODEL)
    gpu = device.type == "cuda"
    precisions = default_precisions(device) if gpu else ["fp32"]
    shown_precision = "fp16" if gpu else "fp32"
    say(f"classifying {SHOWN_IMAGES} shipped images with {DEFAULT_MODEL} on {device}")
    predictions, backend = classify_shown(source, shown_precision, device)
    if not gpu:
        say(f"backend {backend['backend']}: {backend['reason']}")
    test_set = shipped_test_set(source, limit)
    say(f"comparing with the readable fp32 model on up to {len(test_set)} images")
    scores = evaluate_precisions(
        source.model,
        precisions,
        test_set.batches(EVALUATION_BATCH)
        if gpu
        else _until(test_set.batches(EVALUATION_BATCH), CPU_COMPARISON_S),
        device=device,
        on_batch=on_batch,
    )
    rows: list[dict[str, Any]] = []
    if latency:
        say("timing the contenders")
        left = None if gpu else max(1.0, CPU_DEADLINE_S - (time.monotonic() - started))
        rows = measure_latency(DEFAULT_MODEL, device, out / "benchmarks", deadline_s=left, say=say)
    figure_reason = why_no_figure()
    report = {
        "fastswin": fastswin.__version__,
        "torch": torch.__version__,
        "device": device_name(device),
        "model": DEFAULT_MODEL,
        "backend": backend,
        "data": f"first {scores[REFERENCE].images} Fashion-MNIST test images",
        "predictions": predictions,
        "parity": {name: score.to_dict() for name, score in scores.items()},
        "latency": rows,
        "failures": [*failed_gates(scores), *red_rows(rows)],
        "figure": None if figure_reason else "report.png",
        "figure_reason": figure_reason,
        "seconds": round(time.monotonic() - started, 1),
    }
    if figure_reason is None:
        images, _ = fashion_mnist_slice("test")
        draw_report(report, images[:SHOWN_IMAGES], out / "report.png")
    write_text(out / "report.json", json.dumps(report, indent=2, allow_nan=False) + "\n")
    return report


def classify_shown(
    source: ModelSource, precision: str, device: torch.device
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The engine's answers for the first test images.

    Returns:
        ``index``, ``label``, ``predicted``, ``probability`` and ``right`` of each; and which
        backend ran them, with what products and why.
    """
    images, labels = fashion_mnist_slice("test")
    pixels = torch.from_numpy(images[:SHOWN_IMAGES]).to(device)
    engine = Engine(source.model, precision, device=device)  # type: ignore[arg-type]
    logits = engine(source.preprocess(pixels))
    rows = top_guesses(logits, source.class_names, top=1)
    choice = engine.report(SHOWN_IMAGES).backend
    assert choice is not None
    predictions = [
        {
            "index": index,
            "label": source.class_names[int(labels[index])],
            "predicted": guesses[0].name,
            "probability": guesses[0].probability,
            "right": guesses[0].index == int(labels[index]),
        }
        for index, guesses in enumerate(rows)
    ]
    return predictions, dataclasses.asdict(choice)


def _until(batches: Iterator[Batch], seconds: float) -> Iterator[Batch]:
    """Batches until the time is up, at least one."""
    end = time.monotonic() + seconds
    for batch in batches:
        yield batch
        if time.monotonic() > end:
            return
