"""``fastswin export``: models for other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fastswin.cli.exit_codes import CheckFailedError
from fastswin.cli.export_options import (
    Check,
    Features,
    Fold,
    ImageSize,
    RandomWeights,
    Ranges,
    Scheme,
    choose_source,
    read_calibration,
)
from fastswin.cli.options import Checkpoint, Json, Model, parse_image_size
from fastswin.cli.output import note, print_json, print_table

app = typer.Typer(
    help="Write a model for another runtime.", rich_markup_mode=None, no_args_is_help=True
)


@app.callback()
def _group() -> None:
    pass


@app.command("onnx")
def onnx(
    output: Annotated[
        Path | None, typer.Option("--output", help="File to write; default: <model>.onnx here.")
    ] = None,
    model: Model = None,
    checkpoint: Checkpoint = None,
    precision: Annotated[str, typer.Option(help="fp32 or fp16.")] = "fp32",
    batch: Annotated[
        str, typer.Option(help="dynamic, or the one batch size it takes.")
    ] = "dynamic",
    image_size: ImageSize = None,
    dynamic_size: Annotated[
        bool, typer.Option("--dynamic-size", help="Take images of any size.")
    ] = False,
    opset: Annotated[str, typer.Option(help="ONNX operator set: a number, or newest.")] = "20",
    attention: Annotated[str, typer.Option(help="plain, standard or fastswin.")] = "plain",
    calibration: Ranges = None,
    scheme: Scheme = "int8",
    features: Features = False,
    fold: Fold = True,
    check: Check = True,
    bound: Annotated[
        float | None, typer.Option(min=0.0, help="Largest legal absolute difference.")
    ] = None,
    random_weights: RandomWeights = False,
    json: Json = False,
) -> None:
    """Write ONNX and compare it with the model in ONNX Runtime; a wrong graph leaves no file."""
    from fastswin.export.onnx import ParityError, export_onnx

    source, name = choose_source(model, checkpoint)
    arguments: dict[str, Any] = {  # which words are legal, the export says
        "precision": precision, "batch": _number_or_word(batch), "opset": _number_or_word(opset),
        "attention": attention, "image_size": parse_image_size(image_size),
        "calibration": read_calibration(calibration, scheme, source),
    }  # fmt: skip
    try:
        report = export_onnx(
            source, output or Path(f"{name}.onnx"), dynamic_size=dynamic_size, features=features,
            fold=fold, check=check, pretrained=not random_weights, bound=bound, **arguments,
        )  # fmt: skip
    except ParityError as error:
        raise CheckFailedError(str(error)) from error
    if json:
        print_json(report.to_dict())
        return
    size = "any size" if dynamic_size else "x".join(map(str, report.image_size))
    note(
        f"{report.path}: {report.node_count} nodes, {report.file_bytes / 2**20:.1f} MiB, "
        f"opset {report.opset}, {report.precision}, batch {report.batch}, {size}, written in "
        f"{report.export_seconds:.0f} s"
    )
    note("operators: " + ", ".join(f"{n} {op}" for op, n in report.op_counts.most_common()))
    if report.parity is None:
        note("not checked (--no-check)")
        return
    print_table(
        f"{report.path.name} in ONNX Runtime against the fp32 model, bound "
        f"{report.parity.bound:.1e}",
        ("images", "constants", "batch", "size", "max abs diff", "top-1 agreement %"),
        [
            (
                row.images,
                "folded" if row.folded else "unfolded",
                row.batch,
                "x".join(map(str, row.image_size)),
                f"{row.max_abs_diff:.2e}",
                "-" if row.top1_agreement is None else f"{100 * row.top1_agreement:.1f}",
            )
            for row in report.parity.rows
        ],
        left=2,
    )


def _number_or_word(text: str) -> int | str:
    return int(text) if text.removeprefix("-").isdigit() else text
