"""``fastswin bench model``."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer

from fastswin.bench.problems import SUITES
from fastswin.bench.record import DEFAULT_ROOT
from fastswin.bench.suites import run_model_suite
from fastswin.cli.exit_codes import CheckFailedError
from fastswin.cli.options import Json, parse_device, split_list, split_numbers
from fastswin.cli.output import Progress, note, print_json, print_table
from fastswin.data.source import check_name
from fastswin.demo.latency import problem_for
from fastswin.doctor import default_bench_grid

app = typer.Typer(help="Time ways to run a model, correctness first.", rich_markup_mode=None)


@app.callback()
def _group() -> None:
    pass


@app.command("model")
def model(
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Models; default: the suite's.")
    ] = None,
    suite: Annotated[str, typer.Option(help=f"One of {', '.join(SUITES)}.")] = "model",
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, tf32, fp16, bf16.")] = None,
    batch: Annotated[list[str] | None, typer.Option(help="Images per call.")] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Contenders; default: all that run here.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
    out: Annotated[Path, typer.Option(help="Root folder of the records.")] = DEFAULT_ROOT,
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds per contender.")] = 1.0,
    warmup: Annotated[int | None, typer.Option(min=0, help="Discarded calls.")] = None,
    iterations: Annotated[int | None, typer.Option(min=1, help="Samples.")] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Start no problem after this many seconds.")
    ] = None,
    json: Json = False,
) -> None:
    """Time whole models. Repeat an option or use commas for several values."""
    if suite not in SUITES:
        raise ValueError(f"--suite must be one of {', '.join(SUITES)}, got {suite!r}")
    names = split_list(model, "--model") or list(SUITES[suite])
    for name in names:
        check_name(name)
    dtypes, batches = default_bench_grid(parse_device(device))
    dtypes = split_list(dtype, "--dtype") or dtypes
    batches = split_numbers(batch, "--batch") or batches
    problems = [problem_for(*case) for case in itertools.product(names, dtypes, batches)]
    with Progress("bench") as progress:
        result = run_model_suite(
            problems,
            split_list(variant, "--variant") or None,
            device,
            out,
            seconds,
            progress.say,
            suite=suite,
            warmup=warmup,
            iterations=iterations,
            deadline_s=deadline,
        )
    if json:
        print_json(result.document | {"problems_found": result.problems_found})
    else:
        print_table(
            f"{result.document['gpu']}, records in {result.path}",
            ("model", "dtype", "batch", "contender", "median ms", "p20", "p80", "p90", "n",
             "roofline ms", "max abs err", "graph", "TF32"),
            [
                (r["case"], r["dtype"], r["batch"], r["variant"],
                 *(f"{r[key]:.4g}" for key in ("median_ms", "p20_ms", "p80_ms", "p90_ms")),
                 r["count"], f"{r['roofline_ms']:.3g}", f"{r['max_abs_err']:.1e}",
                 "yes" if r["graph"] else "no", "on" if r["tf32"] else "off")
                for r in result.document["records"]
            ],
            left=4,
        )  # fmt: skip
    for line in result.problems_found[1:]:
        note(f"fastswin: {line}")
    if result.exit_code:
        raise CheckFailedError(result.problems_found[0])
