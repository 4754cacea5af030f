"""``fastswin evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

import fastswin
from fastswin.bench.record import device_name
from fastswin.cli.exit_codes import CheckFailedError
from fastswin.cli.options import Checkpoint, Device, Json, Model, parse_device, split_list
from fastswin.cli.output import Progress, note, print_json, print_table
from fastswin.data.processes import join_processes
from fastswin.data.shipped import DEFAULT_MODEL
from fastswin.data.source import open_source
from fastswin.data.test_set import open_test_set
from fastswin.doctor import default_precisions
from fastswin.evaluation import REFERENCE, evaluate_precisions, failed_gates, merge_scores


def evaluate(
    model: Model = None,
    checkpoint: Checkpoint = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Photos: folder or tar files; default: the shipped Fashion-MNIST slice."),
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="Labels file of a flat folder: text, CSV or JSON.")
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="Engine precisions and calibrated schemes such as int8, repeated or with commas; "
            "default: all usable engine precisions."
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Ranges from 'fastswin calibrate'; default: those in the checkpoint."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images per forward call.")] = 64,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first N images only.")] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest legal top-1 difference, in points.")
    ] = 0.1,
    quantized_tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest legal top-1 loss of a scheme, in points.")
    ] = 0.3,
    device: Device = None,
    json: Json = False,
) -> None:
    """Accuracy of precisions beside the readable fp32 model; torchrun spreads it over GPUs."""
    with join_processes(parse_device(device)) as processes:
        target = processes.device
        precisions = split_list(precision, "--precision") or default_precisions(target)
        if model is None and checkpoint is None:
            model = DEFAULT_MODEL
        source = open_source(model, checkpoint)
        test_set = open_test_set(
            source, data, labels, limit, share=(processes.rank, processes.count)
        )
        calibrations = source.calibrations(calibration)
        with Progress("evaluated", len(test_set)) as progress:
            scores = evaluate_precisions(
                source.model,
                precisions,
                test_set.batches(batch),
                device=target,
                calibrations=calibrations,
                on_batch=progress.advance if processes.first else None,
            )
        scores = merge_scores(processes.gather(scores))
        if not processes.first:
            return
    failures = failed_gates(
        scores, tolerance, quantized=set(calibrations), quantized_points=quantized_tolerance
    )
    rows = {name: score.to_dict() for name, score in scores.items()}
    if json:
        print_json(
            {
                "model": source.name,
                "data": test_set.name,
                "device": str(target),
                "device_name": device_name(target),
                "torch": torch.__version__,
                "fastswin": fastswin.__version__,
                "batch": batch,
                "processes": processes.count,
                "tolerance_points": tolerance,
                "quantized_tolerance_points": quantized_tolerance,
                "calibrations": {
                    name: {"images": c.images, "scheme_fingerprint": c.scheme.fingerprint}
                    for name, c in calibrations.items()
                    if name in scores
                },
                "scores": rows,
                "failures": failures,
            }
        )
    else:
        print_table(
            f"{source.name} on {test_set.name}, {scores[REFERENCE].images} images, {target}",
            ("precision", "top-1 %", "top-5 %", "agreement %", "max abs diff", "images/s"),
            [
                (
                    name,
                    f"{row['top1_percent']:.2f}",
                    f"{row['top5_percent']:.2f}",
                    f"{row['agreement_percent']:.2f}",
                    f"{row['max_abs_diff']:.2e}",
                    f"{row['images_per_s']:.0f}",
                )
                for name, row in rows.items()
            ],
        )
    for line in failures[1:]:
        note(f"fastswin: check failed: {line}")
    if failures:
        raise CheckFailedError(failures[0])
