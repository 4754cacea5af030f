"""Options that the export commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastswin.data.shipped import DEFAULT_MODEL
from fastswin.export.source import open_model
from fastswin.quant import Calibration, load_ranges

ImageSize = Annotated[
    str | None,
    typer.Option("--image-size", help="Pixels, as 224 or 224x288; default: the model's own."),
]
Ranges = Annotated[
    Path | None,
    typer.Option("--calibration", help="Ranges from 'fastswin calibrate': those layers in 8 bits."),
]
Scheme = Annotated[str, typer.Option("--scheme", help="Which scheme of --calibration.")]
Features = Annotated[
    bool, typer.Option("--features", help="Return the stages' maps, not the logits.")
]
Fold = Annotated[
    bool, typer.Option("--fold/--no-fold", help="Fold shape constants in the ONNX graph.")
]
Check = Annotated[
    bool,
    typer.Option("--check/--no-check", help="Compare the graph with the model; needs onnxruntime."),
]
RandomWeights = Annotated[
    bool, typer.Option("--random-weights", help="Do not fetch a published model's weights.")
]


def choose_source(
    model: str | None, checkpoint: Path | None, onnx: Path | None = None
) -> tuple[str | Path, str]:
    """What to export, and the stem of the file it becomes by default.

    Raises:
        ValueError: more than one was given.
    """
    if sum(given is not None for given in (model, checkpoint, onnx)) > 1:
        raise ValueError("give one of --model, --checkpoint and --onnx")
    source: str | Path = onnx or checkpoint or model or DEFAULT_MODEL
    return source, source if isinstance(source, str) else source.stem


def read_calibration(path: Path | None, scheme: str, source: str | Path) -> Calibration | None:
    """One scheme's ranges of a model from a file; None without a file.

    Raises:
        ValueError: the file holds no such scheme.
    """
    if path is None:
        return None
    model, _, _ = open_model(source)
    found = load_ranges(path, model)
    if scheme not in found:
        raise ValueError(f"--scheme must be one of {sorted(found)} in {path.name}, got {scheme!r}")
    return found[scheme]
