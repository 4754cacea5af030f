"""Compare variants of the engine in whole models on one device: what its tables are chosen by.

    python -m fastswin.bench.variants --models T:8,32,V2T:8 --variants FILE.py --seconds 45

Launches apart do not show what a kernel costs its neighbours, and two builds of one plan differ by
where their memory lies, so every (model, batch, variant) is a process that builds the whole model,
compares its logits with fp64 and then takes turns with the others (variants_turns.py). FILE.py
changes tables, constants or kernels before the engine is built (variants_patch.py); its first
variant is the baseline.

Prints the table (variants_table.py) on standard output, progress on standard error; ``--out`` also
writes every turn. Exit codes: 0 all measured and right, 1 something was not, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fastswin.bench.problems import Problem, parse_names
from fastswin.bench.record import current_commit, device_name
from fastswin.bench.suites import choose_device
from fastswin.bench.tables import print_table
from fastswin.bench.variants_plan import (
    ALIASES,
    Job,
    VariantsFile,
    load_variants,
    parse_models,
    plan_waves,
)
from fastswin.bench.variants_table import WRONG_FROM, Row, make_rows, make_table
from fastswin.bench.variants_turns import Result, run_wave
from fastswin.data.atomic import write_text

#: Processes of a wave: each holds a model and a CUDA context, and wants a core while it builds.
PROCESSES = 16

#: Names of the files in the folder of ``--out``.
TURNS_FILE, REPORTS_FILE = "variants.json", "variants_reports.txt"


def run_variants(
    problems: Sequence[Problem],
    file: VariantsFile,
    *,
    only: Sequence[str] | None = None,
    device: str | None = None,
    seconds: float = 45.0,
    processes: int = PROCESSES,
    build_s: float = 240.0,
    out: Path | None = None,
    reports: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Measure variants beside their baseline, wave by wave.

    Args:
        problems: models and batches, all in one of the precisions of
            :data:`~fastswin.bench.variants_table.WRONG_FROM`.
        file: the variants.
        only: run these beside the baseline; None runs all.
        device: "cuda" or "cpu"; None takes the GPU where there is one.
        seconds: of turns, for each wave.
        processes: built and held at a time.
        build_s: longest that a process may build, in s.
        out: folder for every turn, rewritten after each wave, or None.
        reports: whether the engines' reports go there as well.
        progress: receives readable lines.

    Returns:
        A row for each problem and variant.

    Raises:
        ValueError: an argument that is not legal; nothing is started.
        RuntimeError: a GPU was named and is not there.
    """
    target, _ = choose_device(device)
    for variant in only or ():
        if variant not in file.patches:
            raise ValueError(f"only must be among {', '.join(file.patches)}, got {variant!r}")
    if seconds <= 0 or build_s <= 0:
        raise ValueError(f"seconds and build_s must be positive, got {seconds:g} and {build_s:g}")
    if reports and out is None:
        raise ValueError("reports need out, the folder that they are written to")
    for problem in problems:
        if problem.dtype not in WRONG_FROM:
            raise ValueError(f"dtype must be one of {sorted(WRONG_FROM)}, got {problem.dtype!r}")
        if problem.tf32 and target.type != "cuda":
            raise ValueError("dtype must be fp32 on a CPU, tf32 is a mode of NVIDIA GPUs")
    jobs = [
        Job(problem, variant, file.path, str(target), reports)
        for problem in problems
        for variant in file.variants_of(problem, only)
    ]
    waves = plan_waves(jobs, processes)
    results: list[Result] = []
    for number, wave in enumerate(waves, start=1):
        progress(f"wave {number} of {len(waves)}: {len(wave)} processes")
        results += run_wave(wave, seconds, build_s, progress)
        if out is not None:
            _write(results, out, target, reports)
    return make_rows(results)


def _write(results: Sequence[Result], out: Path, device: torch.device, reports: bool) -> None:
    """Rows with all turns as JSON, and the engines' reports."""
    document = {
        "commit": current_commit(),
        "card": device_name(device),
        "torch": torch.__version__,
        "rows": [dataclasses.asdict(row) for row in make_rows(results)],
    }
    write_text(out / TURNS_FILE, json.dumps(document, indent=1, allow_nan=False) + "\n")
    if reports:
        parts = [f"== {r.job}\n{r.ready.report}\n" for r in results if r.ready]
        write_text(out / REPORTS_FILE, "\n".join(parts))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare variants from the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        target, _ = choose_device(options.device)
        dtype = options.dtype or ("fp16" if target.type == "cuda" else "fp32")
        file = load_variants(options.variants)
        rows = run_variants(
            parse_models(options.models, dtype),
            file,
            only=options.only and parse_names(options.only, list(file.patches), "only"),
            device=options.device,
            seconds=options.seconds,
            processes=options.processes,
            build_s=options.build_s,
            out=options.out,
            reports=options.reports,
            progress=_progress,
        )
    except (ValueError, RuntimeError, OSError) as error:
        _progress(f"error: {error}")
        return 2
    print_table(make_table(rows, f"variants, {dtype}, {device_name(target)}"))
    return 1 if any(row.failure or row.wrong for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastswin.bench.variants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models", required=True,
        help=f"NAME:BATCH,..., a number alone repeats the model; short: {','.join(ALIASES)}",
    )  # fmt: skip
    parser.add_argument("--variants", type=Path, required=True, help="Python that defines VARIANTS")
    parser.add_argument("--only", help="names of variants to run beside the first; default: all")
    parser.add_argument("--dtype", choices=sorted(WRONG_FROM), help="default: fp16 (CPU: fp32)")
    parser.add_argument("--seconds", type=float, default=45.0, help="of turns, for each wave")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="built and held at a time")
    parser.add_argument("--build-s", type=float, default=240.0, help="longest that one may build")
    parser.add_argument("--device", help="cuda or cpu; default: cuda where there is one")
    parser.add_argument("--out", type=Path, help=f"folder for {TURNS_FILE}, which has every turn")
    parser.add_argument("--reports", action="store_true", help=f"write {REPORTS_FILE} there, too")
    return parser


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
