"""``fastswin export``: models for other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastswin.cli.exit_codes import CheckFailedError
from fastswin.cli.options import Checkpoint, Json, Model, parse_image_size
from fastswin.cli.output import note, print_json, print_table
from fastswin.data.shipped import DEFAULT_MODEL

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
    image_size: Annotated[
        str | None, typer.Option(help="Pixels, as 224 or 224x288; default: the model's own.")
    ] = None,
    dynamic_size: Annotated[
        bool, typer.Option("--dynamic-size", help="Take images of any size.")
    ] = False,
    opset: Annotated[int, typer.Option(help="ONNX operator set.")] = 20,
    attention: Annotated[str, typer.Option(help="plain, standard or fastswin.")] = "plain",
    features: Annotated[
        bool, typer.Option("--features", help="Return the stages' maps, not the logits.")
    ] = False,
    fold: Annotated[
        bool, typer.Option("--fold/--no-fold", help="Fold shape constants in the file.")
    ] = True,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare with the model; needs onnxruntime.")
    ] = True,
    bound: Annotated[
        float | None, typer.Option(min=0.0, help="Largest legal absolute difference.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Do not fetch a published model's weights.")
    ] = False,
    json: Json = False,
) -> None:
    """Write ONNX and compare it with the model in ONNX Runtime; a wrong graph leaves no file."""
    from fastswin.export.onnx import ParityError, export_onnx

    if model is not None and checkpoint is not None:
        raise ValueError("give --model or --checkpoint, not both")
    source: str | Path = checkpoint or model or DEFAULT_MODEL
    path = output or Path(f"{Path(source).stem if checkpoint else source}.onnx")
    try:
        report = export_onnx(
            source, path, precision=precision, batch=_batch(batch),  # type: ignore[arg-type]
            image_size=parse_image_size(image_size), dynamic_size=dynamic_size, opset=opset,
            attention=attention, features=features, fold=fold, check=check,  # type: ignore[arg-type]
            pretrained=not random_weights, bound=bound,
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


def _batch(text: str) -> int | str:
    return int(text) if text.isdigit() else text
