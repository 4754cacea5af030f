"""The commands and the order in which ``fastswin --help`` lists them."""

from __future__ import annotations

from typing import Annotated

import typer

import fastswin
from fastswin.cli import (
    bench,
    bench_train,
    calibrate,
    classify,
    demo,
    doctor,
    evaluate,
    export,
    export_tensorrt,
    models,
    profile,
    tune,
    warmup,
)

EPILOG = (
    "Exit codes: 0 ok; 1 a check failed; 2 bad input or usage; 3 something needed is missing on "
    "this machine; 4 a defect of fastswin. --debug anywhere adds the traceback."
)

app = typer.Typer(
    name="fastswin",
    help="Swin Transformers, fast on the GPU, with the same answers.",
    epilog=EPILOG,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"fastswin {fastswin.__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    pass


app.command("demo")(demo.demo)
app.command("classify")(classify.classify)
bench.app.command("train")(bench_train.bench_train)
app.add_typer(bench.app, name="bench")
app.command("evaluate")(evaluate.evaluate)
app.command("calibrate")(calibrate.calibrate)
app.command("profile")(profile.profile)
app.command("tune")(tune.tune)
app.command("warmup")(warmup.warmup)
export.app.command("tensorrt")(export_tensorrt.tensorrt)
app.add_typer(export.app, name="export")
app.command("models")(models.models)
app.command("doctor")(doctor.doctor)
