"""``python -m fastswin.bench model``: the suites without any command-line package.

Prints the table on standard output (or the JSON document with ``--json``) and progress on standard
error. Exit codes: 0 all measured and right, 1 something was not, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fastswin.bench.compile_cache import warm_compile_cache
from fastswin.bench.contenders import COMPILED, VARIANTS
from fastswin.bench.parallel import run_parallel
from fastswin.bench.problems import (
    PRECISIONS,
    SUITES,
    Problem,
    make_problems,
    parse_batches,
    parse_names,
)
from fastswin.bench.record import DEFAULT_ROOT
from fastswin.bench.suites import choose_device, run_model_suite
from fastswin.bench.tables import make_table, print_table
from fastswin.models import list_models


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a suite from the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        on_cpu = choose_device(options.device)[0].type == "cpu"
        problems = make_problems(
            options.suite,
            options.models and parse_names(options.models, list_models(), "models"),
            parse_names(options.dtypes or "fp32", list(PRECISIONS), "dtypes")
            if options.dtypes or on_cpu
            else None,
            parse_batches(options.batches or "1") if options.batches or on_cpu else None,
            options.checkpoint,
        )
        variants = options.variants and parse_names(options.variants, list(VARIANTS), "variants")
        if options.processes:
            return _run_parallel(problems, variants, options)
        cold_build_s = {}
        if options.compile_workers and not on_cpu:
            cold_build_s = warm_compile_cache(
                problems,
                options.compile_workers,
                variants=[v for v in variants or VARIANTS if v in COMPILED],
                device=options.device or "cuda",
                timeout_s=options.compile_s,
                progress=_progress,
            )
        result = run_model_suite(
            problems,
            variants,
            options.device,
            options.out,
            options.seconds,
            _progress,
            suite=options.suite,
            warmup=options.warmup,
            iterations=options.iterations,
            deadline_s=options.deadline_s,
            cold_build_s=cold_build_s,
        )
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        _progress(f"error: {error}")
        return 2
    if options.json:
        print(json.dumps(result.document, indent=1, allow_nan=False))
    else:
        print_table(make_table(result.document))
    for line in result.problems_found:
        _progress(f"not measured: {line}")
    return result.exit_code


def _run_parallel(
    problems: list[Problem], variants: list[str] | None, options: argparse.Namespace
) -> int:
    def wait_for_file() -> None:
        while options.wait_for and not options.wait_for.exists():
            time.sleep(0.5)

    wrong = run_parallel(
        problems, options.processes, variants, device=options.device, suite=options.suite,
        out=options.out, seconds_per_contender=options.seconds, build_s=options.compile_s,
        start_timing=wait_for_file, progress=_progress,
    )  # fmt: skip
    for line in wrong:
        _progress(f"not measured: {line}")
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fastswin.bench", description=__doc__)
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("--models", help="comma-separated names; default: the suite's")
    parser.add_argument("--dtypes", help="default: fp16,bf16 (CPU: fp32)")
    parser.add_argument("--batches", help="default: 1,8,32,64 (CPU: 1)")
    parser.add_argument("--variants", help=f"of {','.join(VARIANTS)}; default: all that can run")
    parser.add_argument("--checkpoint", help="state dict for a single model; default: seeded")
    parser.add_argument("--device", help="cuda or cpu; default: cuda where there is one")
    parser.add_argument("--out", type=Path, default=DEFAULT_ROOT, help="root of the results")
    parser.add_argument("--seconds", type=float, default=1.0, help="per contender and problem")
    parser.add_argument("--warmup", type=int, help="exact number of discarded calls")
    parser.add_argument("--iterations", type=int, help="exact number of samples")
    parser.add_argument("--deadline-s", type=float, help="start no problem later than this")
    parser.add_argument("--compile-workers", type=int, default=0, help="compile ahead in parallel")
    parser.add_argument("--processes", type=int, help="build this many problems side by side")
    parser.add_argument("--wait-for", type=Path, help="with --processes: time once this exists")
    parser.add_argument("--compile-s", type=float, default=600.0, help="limit for compiling ahead")
    parser.add_argument("--json", action="store_true", help="print the records, not a table")
    return parser


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
