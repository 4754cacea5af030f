"""``fastswin calibrate``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from fastswin.cli.options import Checkpoint, Device, Json, Model, parse_device, split_list
from fastswin.cli.output import Progress, note, print_json, print_table
from fastswin.data.preprocess import metadata_for
from fastswin.data.processes import join_processes
from fastswin.data.shipped import DEFAULT_MODEL
from fastswin.data.source import ModelSource, open_source
from fastswin.data.test_set import TestSet, open_calibration_set
from fastswin.quant import (
    Calibration,
    SpeedTable,
    calibration_of,
    choose_layers,
    find_scheme,
    observe,
    save_quantized,
    save_ranges,
    sensitivity,
)


def calibrate(
    out: Annotated[
        Path,
        typer.Option(help="What to write: .safetensors with the weights, or .json without them."),
    ],
    model: Model = None,
    checkpoint: Checkpoint = None,
    scheme: Annotated[
        list[str] | None,
        typer.Option(help="int8 (default), int8_mode1, int8_mode2, fp8; repeated or with commas."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Photos: folder or tar files; default: 512 shipped training images."),
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="Labels file of a flat folder.")] = None,
    images: Annotated[int, typer.Option(min=1, help="Images, spread over the data.")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Images per forward call.")] = 32,
    state: Annotated[
        Path | None, typer.Option(help="File to go on from after an interruption.")
    ] = None,
    report: Annotated[
        bool, typer.Option(help="Print what each layer's quantisation costs; two passes a layer.")
    ] = False,
    auto: Annotated[
        bool, typer.Option(help="Keep wide what costs accuracy or, with --speed, saves no time.")
    ] = False,
    budget: Annotated[
        float, typer.Option(min=0.0, help="With --auto: largest top-1 loss, in points.")
    ] = 0.3,
    speed: Annotated[
        Path | None, typer.Option(help="With --auto: JSON of layer times on a card and batch.")
    ] = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Choose int8 and fp8 ranges from images; torchrun spreads the images over GPUs."""
    schemes = [find_scheme(name) for name in split_list(scheme, "--scheme") or ["int8"]]
    if out.suffix not in (".safetensors", ".json"):
        raise ValueError(f"--out must end in .safetensors or .json, got {out}")
    if speed is not None and not auto:
        raise ValueError("--speed needs --auto, which it serves")
    table = None if speed is None else SpeedTable.load(speed)
    if model is None and checkpoint is None:
        model = DEFAULT_MODEL
    with join_processes(parse_device(device)) as processes:
        if (auto or report) and processes.count > 1:
            raise ValueError("--auto and --report run in one process; start without torchrun")
        source = open_source(model, checkpoint)
        source.model.to(processes.device)
        chosen = open_calibration_set(
            source, data, labels, images, share=(processes.rank, processes.count)
        )
        with Progress("calibrated", len(chosen)) as progress:
            seen = observe(
                source.model,
                chosen.batches(batch),
                state=state,
                on_batch=progress.advance if processes.first else None,
            )
        if not processes.first:
            return
    calibrations = [calibration_of(source.model, seen, s) for s in schemes]
    if auto:
        with Progress("layers") as progress:
            calibrations = [
                choose_layers(
                    source.model,
                    calibration,
                    chosen.batches(batch),
                    budget_points=budget,
                    speed=table,
                    on_layer=lambda _: progress.advance(),
                )
                for calibration in calibrations
            ]
    reports = _reports(source, calibrations, chosen, batch) if report else {}
    _write(source, calibrations, out)
    if json:
        print_json(
            {
                "model": source.name,
                "data": chosen.name,
                "images": seen.images,
                "out": str(out),
                "calibrations": {c.scheme.name: c.to_dict() for c in calibrations},
                "wide": {c.scheme.name: _wide(c) for c in calibrations},
                "reports": reports,
            }
        )
        return
    for calibration in calibrations:
        name, wide = calibration.scheme.name, _wide(calibration)
        if name in reports:
            _print_report(name, reports[name])
        if wide:
            print(f"{name}: wide: {', '.join(wide)}")
    names = ", ".join(c.scheme.name for c in calibrations)
    print(f"{source.name}: {names} from {seen.images} images of {chosen.name}: {out}")


def _wide(calibration: Calibration) -> list[str]:
    return [name for name, r in calibration.layers.items() if not r.scheme.quantized]


def _reports(
    source: ModelSource, calibrations: list[Calibration], chosen: TestSet, batch: int
) -> dict[str, Any]:
    reports = {}
    with Progress("layers", sum(len(c.layers) - len(_wide(c)) for c in calibrations)) as progress:
        for calibration in calibrations:
            found = sensitivity(
                source.model,
                calibration,
                chosen.batches(batch),
                on_layer=lambda _: progress.advance(),
            )
            reports[calibration.scheme.name] = found.to_dict()
    return reports


def _print_report(name: str, report: dict[str, Any]) -> None:
    def rows() -> Iterator[tuple[str, ...]]:
        layers = sorted(report["layers"].values(), key=lambda r: r["alone"]["snr_db"])
        for layer in layers:
            alone, rest = layer["alone"], layer["all_but_this"]
            yield (
                layer["name"],
                f"{layer['snr_db']:.1f}",
                f"{alone['snr_db']:.1f}",
                f"{alone['cosine']:.5f}",
                f"{rest['top1_percent']:.2f}",
            )

    whole = report["quantized"]
    print_table(
        f"{name}: top-1 {whole['top1_percent']:.2f} % of {whole['images']} calibration images, "
        f"fp32 {report['fp32_top1_percent']:.2f} %",
        ("layer", "SNR dB", "logits SNR dB alone", "cosine alone", "top-1 % with it wide"),
        rows(),
    )


def _write(source: ModelSource, calibrations: list[Calibration], out: Path) -> None:
    source.model.cpu()
    if out.suffix == ".json":
        save_ranges(source.model, calibrations, out)
    else:
        metadata = metadata_for(source.preprocess, source.class_names)
        save_quantized(source.model, calibrations, out, metadata)
    note(f"wrote {out} ({out.stat().st_size:,} bytes)")
