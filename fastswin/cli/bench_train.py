"""``fastswin bench train``: one optimiser step, and how it scales over GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastswin.bench import train, train_scaling
from fastswin.bench.problems import Problem
from fastswin.bench.record import DEFAULT_ROOT
from fastswin.bench.train_contenders import DTYPES, VARIANTS
from fastswin.bench.train_scaling_plan import AVERAGING, ScalingPlan
from fastswin.cli.exit_codes import CheckFailedError
from fastswin.cli.options import Json, split_list, split_numbers
from fastswin.cli.output import Progress, note, print_json, print_table
from fastswin.data.source import check_name

SUITES = (train.SUITE, train_scaling.SUITE)


def bench_train(
    suite: Annotated[str, typer.Option(help=f"One of {', '.join(SUITES)}.")] = train.SUITE,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Models; default: the suite's.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bf16",
    batch: Annotated[list[str] | None, typer.Option(help="Images per step and GPU.")] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(VARIANTS)}; default: all.")
    ] = None,
    gpus: Annotated[
        list[str] | None, typer.Option(help="Numbers of GPUs of suite scaling; default 1,2,4.")
    ] = None,
    averaging: Annotated[
        list[str] | None,
        typer.Option(help="Who averages gradients in suite scaling: ddp (default), graph."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
    out: Annotated[Path, typer.Option(help="Root folder of the records.")] = DEFAULT_ROOT,
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds per contender.")] = 3.0,
    deadline: Annotated[
        float | None, typer.Option(help="Start no problem after this many seconds.")
    ] = None,
    json: Json = False,
) -> None:
    """Time forward, backward and AdamW, gradients checked first. Options repeat or take commas."""
    if suite not in SUITES:
        raise ValueError(f"--suite must be one of {', '.join(SUITES)}, got {suite!r}")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    names = split_list(model, "--model")
    for name in names:
        check_name(name)
    batches = split_numbers(batch, "--batch") or [train.DEFAULT_BATCH]
    variants = split_list(variant, "--variant")
    if suite == train_scaling.SUITE:
        names = names or list(train.DEFAULT_MODELS[:1])
        if len(names) != 1 or len(batches) != 1 or len(variants) > 1:
            raise ValueError("--suite scaling takes one --model, one --batch and one --variant")
        with Progress("bench") as progress:
            plan = ScalingPlan(
                Problem(names[0], dtype, batches[0]),
                split_numbers(gpus, "--gpus") or [1, 2, 4],
                variants[0] if variants else "fastswin",
                seconds,
                split_list(averaging, "--averaging") or AVERAGING[:1],
            )
            document, wrong = train_scaling.run(plan, out, progress=progress.say)
    else:
        names = names or list(train.DEFAULT_MODELS)
        problems = [Problem(name, dtype, size) for name in names for size in batches]
        with Progress("bench") as progress:
            result = train.run(
                problems, variants or None, device, out, seconds, deadline, progress.say
            )
        document, wrong = result.document, list(result.problems_found)
    if json:
        print_json(document | {"problems_found": wrong})
    elif suite == train_scaling.SUITE:
        print("\n".join(train_scaling.table_lines(document)))
    else:
        table = train.make_table(document)
        print_table(table.title, table.header, table.rows, left=2)
        print(table.caption)
    for line in wrong[1:]:
        note(f"fastswin: {line}")
    if wrong:
        raise CheckFailedError(wrong[0])
