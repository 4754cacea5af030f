"""``fastswin classify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastswin.classification import classify_files
from fastswin.cli.options import Checkpoint, Device, Json, Model, parse_device
from fastswin.cli.output import Progress, print_json, print_table
from fastswin.data.source import open_source
from fastswin.engine import Engine


def classify(
    images: Annotated[list[Path], typer.Argument(help="Photos of any size and mode.")],
    model: Model = None,
    checkpoint: Checkpoint = None,
    precision: Annotated[
        str | None,
        typer.Option(help="fp32, tf32, fp16 or bf16; default: fp16 on a GPU, fp32 on a CPU."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Classes to print per image.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Images per forward call.")] = 16,
    device: Device = None,
    json: Json = False,
) -> None:
    """Print the most probable classes of photos."""
    if model is None and checkpoint is None:
        raise ValueError("--model or --checkpoint is needed (see fastswin models)")
    target = parse_device(device)
    source = open_source(model, checkpoint)
    precision = precision or ("fp16" if target.type == "cuda" else "fp32")
    engine = Engine(source.model, precision, device=target)  # type: ignore[arg-type]
    predictions = []
    with Progress("classified", len(images)) as progress:
        for prediction in classify_files(
            engine,
            images,
            source.preprocess,
            source.class_names,
            top=top,
            batch=batch,
            device=target,
        ):
            predictions.append(prediction)
            progress.advance()
    if json:
        print_json(
            {
                "model": source.name,
                "precision": precision,
                "device": str(target),
                "images": [prediction.to_dict() for prediction in predictions],
            }
        )
        return
    for prediction in predictions:
        print_table(
            prediction.image,
            ("class", "name", "probability"),
            [(g.index, g.name, f"{g.probability:.4f}") for g in prediction.guesses],
            left=2,
        )
