"""``fastswin tune``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from fastswin.bench.tune_models import parse_batches, tune_models
from fastswin.cli.exit_codes import CheckFailedError
from fastswin.cli.options import Json, split_list
from fastswin.cli.output import Progress, print_json, print_table


def tune(
    model: Annotated[
        list[str],
        typer.Option("--model", help="Names, or NAME:8:32 with own batches; repeat or use commas."),
    ],
    batches: Annotated[
        str, typer.Option(help="Batch sizes: 1-64 (the captured ones in it) or 1,8,32.")
    ] = "1-64",
    precision: Annotated[str, typer.Option(help="fp16, bf16, fp32 or tf32.")] = "fp16",
    out: Annotated[Path, typer.Option(help="The table; an existing one is continued.")] = Path(
        "fastswin-tuning.json"
    ),
    device: Annotated[str | None, typer.Option(help="cuda or cuda:N.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Compiling processes; default: cores less two.")
    ] = None,
    deadline_s: Annotated[
        float, typer.Option("--deadline-s", min=1.0, help="Stop after this many seconds.")
    ] = 480.0,
    compare: Annotated[
        bool, typer.Option(help="Let whole models decide which rows of the table answer.")
    ] = True,
    json: Json = False,
) -> None:
    """Measure which kernels are fastest on this GPU and write them to a table."""
    with Progress("tune") as progress:
        result, comparisons = tune_models(
            split_list(model, "--model"),
            parse_batches(batches),
            precision,
            out,
            device=device,
            workers=workers,
            deadline_s=deadline_s,
            compare=compare,
            progress=progress.say,
        )
    rows = [dataclasses.asdict(comparison) for comparison in comparisons]
    counts = {"tuned": result.tuned, "known": result.known, "left": result.left}
    if json:
        print_json({"table": str(out), **counts, "rejected": result.rejected, "compared": rows})
    else:
        print_table(
            f"engine at {precision}, with heuristics and with {out}",
            ("model", "batch", "heuristic ms", "tuned ms", "speed-up", "layers", "max abs diff"),
            [_row(row) for row in rows],
        )
        print(
            f"{out}: {result.tuned} launches tuned, {result.known} known before, "
            f"{len(result.rejected)} candidates rejected"
        )
    if result.left:
        raise CheckFailedError(
            f"{result.left} launches are left; run the same command again to continue {out}"
        )


def _row(row: dict) -> tuple:
    head = (row["model"], row["batch"])
    if row["message"]:
        return (*head, row["message"], "", "", "", "")
    before, after = row["heuristic_ms"], row["tuned_ms"]
    speed_up, difference = f"{before / after:.3f}", f"{row['max_abs_diff']:.1e}"
    return (*head, f"{before:.4g}", f"{after:.4g}", speed_up, row["units"], difference)
