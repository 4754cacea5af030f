"""``fastswin bench model``, ``op`` and ``startup``."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer

from fastswin.bench import op_mlp, op_softmax, op_window_attention, startup
from fastswin.bench.backends import (
    BACKEND_SUITE,
    BACKENDS,
    backend_variants,
    make_backend_table,
)
from fastswin.bench.compile_cache import warm_compile_cache
from fastswin.bench.contenders import COMPILED, VARIANTS
from fastswin.bench.problems import SUITES
from fastswin.bench.quant import run_quant_suite
from fastswin.bench.quant_entries import make_entries
from fastswin.bench.record import DEFAULT_ROOT
from fastswin.bench.startup_tables import HEADER, startup_rows
from fastswin.bench.suites import choose_device, run_model_suite
from fastswin.bench.tables import make_table
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
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            "--precision",
            help="fp32, tf32, fp16, bf16, int8, int8_mode1, int8_mode2, fp8; with --suite quant "
            "those beside fp16, default int8 and fp8.",
        ),
    ] = None,
    batch: Annotated[list[str] | None, typer.Option(help="Images per call.")] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Contenders; default: all that run here.")
    ] = None,
    backends: Annotated[
        list[str] | None,
        typer.Option(help=f"Instead of variants, runtimes: {', '.join(BACKENDS)}, or all."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="State dict for a single model; default: seeded weights.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
    out: Annotated[Path, typer.Option(help="Root folder of the records.")] = DEFAULT_ROOT,
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds per contender.")] = 1.0,
    warmup: Annotated[int | None, typer.Option(min=0, help="Discarded calls.")] = None,
    iterations: Annotated[int | None, typer.Option(min=1, help="Samples.")] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Start no problem after this many seconds.")
    ] = None,
    compile_workers: Annotated[
        int, typer.Option(min=0, help="On a GPU: compile in parallel first, measure after.")
    ] = 0,
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
    if checkpoint is not None and len(names) != 1:
        raise ValueError(f"--checkpoint fits one model, --model names {len(names)}")
    cases = itertools.product(names, dtypes, batches)
    problems = [problem_for(*case, checkpoint=checkpoint) for case in cases]
    variants = split_list(variant, "--variant") or None
    if runtimes := split_list(backends, "--backends"):
        if variants is not None:
            raise ValueError("--backends stands for variants; leave out --variant")
        variants = backend_variants(list(BACKENDS) if runtimes == ["all"] else runtimes)
        suite = BACKEND_SUITE
    with Progress("bench") as progress:
        if suite == "quant":
            entries = make_entries(
                split_list(dtype, "--dtype") or None, variants, choose_device(device)[0]
            )
            cases = itertools.product(names, [entries[0].dtype], batches)
            result = run_quant_suite(
                [problem_for(*case, checkpoint=checkpoint) for case in cases],
                entries,
                device,
                out,
                seconds,
                progress.say,
                deadline_s=deadline,
            )
        else:
            cold_build_s = {}
            if compile_workers:
                cold_build_s = warm_compile_cache(
                    problems,
                    compile_workers,
                    variants=[v for v in variants or VARIANTS if v in COMPILED],
                    device=device or "cuda",
                    progress=progress.say,
                )
            result = run_model_suite(
                problems,
                variants,
                device,
                out,
                seconds,
                progress.say,
                suite=suite,
                warmup=warmup,
                iterations=iterations,
                deadline_s=deadline,
                cold_build_s=cold_build_s,
                forgiving=bool(runtimes),
            )
    if json:
        print_json(result.document | {"problems_found": result.problems_found})
    else:
        table = (make_backend_table if runtimes else make_table)(result.document)
        print_table(table.title, table.header, table.rows, left=2)
        print(f"{table.caption}\nrecords: {result.path}")
    for outcome in result.outcomes if runtimes else ():
        if outcome.status == "unavailable":
            note(f"fastswin: {outcome.problem} {outcome.variant}: {outcome.message}")
    for line in result.problems_found[1:]:
        note(f"fastswin: {line}")
    if result.exit_code:
        raise CheckFailedError(result.problems_found[0])


#: Operators that have a benchmark.
OPERATORS = ("mlp", "softmax", "window_attention")


@app.command("op")
def operator(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(OPERATORS)}.")],
    case: Annotated[
        list[str] | None, typer.Option(help="Problems; default: all of the operator.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
    out: Annotated[Path, typer.Option(help="Root folder of the records.")] = DEFAULT_ROOT,
    seconds: Annotated[float, typer.Option(min=0.01, help="Per contender and direction.")] = 0.5,
    deadline: Annotated[float, typer.Option(help="Start no problem after this many seconds.")] = (
        480.0
    ),
    backward: Annotated[
        bool, typer.Option("--backward", help="window_attention: also backward and step.")
    ] = False,
    json: Json = False,
) -> None:
    """Time one operator, mlp forward only. Repeat an option or use commas."""
    if name not in OPERATORS:
        raise ValueError(f"NAME must be one of {', '.join(OPERATORS)}, got {name!r}")
    target, notes = choose_device(device)
    lines: list[str] = []
    with Progress("bench") as progress:

        def say(line: str) -> None:
            lines.append(line)
            progress.say(line)

        cases = split_list(case, "--case")
        if name == "softmax":
            result = op_softmax.run(target, out, cases, seconds, deadline, say)
        elif name == "mlp":
            result = op_mlp.run(target, out, cases, seconds, deadline, say)
        else:
            result = op_window_attention.run(target, out, cases, seconds, deadline, say, backward)
    problems_found = [*notes, *result.problems_found]
    if json:
        print_json(result.document | {"problems_found": problems_found})
    else:
        print("\n".join([*lines, f"records: {result.path}"]))
    for line in problems_found[1:]:
        note(f"fastswin: {line}")
    if problems_found:
        raise CheckFailedError(problems_found[0])


@app.command("startup")
def startup_command(
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Models; default: Swin-T and Swin-B.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Precisions; default: fp16, on a CPU fp32.")
    ] = None,
    batch: Annotated[list[str] | None, typer.Option(help="Images; default: 1.")] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(startup.VARIANTS)}.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
    out: Annotated[Path, typer.Option(help="Root folder of the records.")] = DEFAULT_ROOT,
    warm_starts: Annotated[int, typer.Option(min=1, help="Starts after the cold one.")] = (
        startup.WARM_STARTS
    ),
    deadline: Annotated[float, typer.Option(help="Start no problem after this many seconds.")] = (
        480.0
    ),
    json: Json = False,
) -> None:
    """Time from starting Python to the first logits, with cold and with warm caches."""
    names = split_list(model, "--model") or None
    for name in names or ():
        check_name(name)
    problems = startup.startup_problems(
        names, split_list(dtype, "--dtype") or None, split_numbers(batch, "--batch") or None, device
    )
    with Progress("bench") as progress:
        result = startup.run_startup(
            problems,
            split_list(variant, "--variant") or None,
            device=device,
            out=out,
            warm_starts=warm_starts,
            deadline_s=deadline,
            progress=progress.say,
        )
    if json:
        print_json({"records": result.records, "problems_found": result.problems_found})
    else:
        print_table(
            "from starting Python to the first logits",
            HEADER,
            startup_rows(result.records),
        )
        print(f"records: {result.path}")
    if result.problems_found:
        raise CheckFailedError(result.problems_found[0])
