"""``python -m fastswin.bench.train_scaling``: DDP over 1, 2, 4, ... GPUs of one machine.

    efficiency = images per second on n GPUs / (n * images per second on one)

``torch.distributed.run`` starts as many processes (train_scaling_worker.py) as the largest number
asks for. A single GPU trains without DDP, as one would. With ``--averaging graph`` (or
``ddp,graph``) each number captures a model of its own, whose graphs average the gradients
themselves (``capture_training(process_group=...)``), instead of DDP. Batch is per GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fastswin.bench.process_group import run_group
from fastswin.bench.record import (
    DEFAULT_ROOT,
    Document,
    Record,
    make_document,
    make_run_info,
    result_path,
    save_records,
    stamp,
)
from fastswin.bench.suites import choose_device, clock_precision, measure_device
from fastswin.bench.train_scaling_plan import ScalingPlan, add_options, read_plan

SUITE = "scaling"


def run(
    plan: ScalingPlan,
    out: str | Path = DEFAULT_ROOT,
    limit_s: float = 300.0,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[Document, list[str]]:
    """Measure each number of GPUs, all in one group of processes.

    Args:
        plan: numbers of GPUs, each at most what the machine has.
        out: root of the results.
        limit_s: after which the group is stopped; what it has measured counts.
        progress: receives readable lines.

    Returns:
        The document of this run, and a line for each number that could not be measured.

    Raises:
        ValueError: a number of GPUs that the machine does not have.
    """
    began = time.monotonic()
    found = torch.cuda.device_count()
    if found and plan.processes > found:
        raise ValueError(
            f"gpus must be at most {found}, which this machine has, got {plan.processes}"
        )
    target, lines = choose_device(None)
    ceilings = measure_device(target, [plan.problem])
    info = make_run_info(
        SUITE, target, ceilings.copy_tbs, ceilings.gemm_tflops[clock_precision(target)]
    )
    progress(f"{plan.problem} {plan.variant}: {plan.processes} processes")
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch, "records.json")
        left_s = max(1.0, limit_s - (time.monotonic() - began))
        announcer = _Announcer(answer, progress)
        failure = run_group(launch_command(plan, answer), left_s, progress, announcer.look)
        records = _read_records(answer)
    done = {(record["gpus"], record["averaging"]) for record in records}
    lines += [
        f"{n} GPUs, {way}: {failure or 'no record'}" for n, way in plan.runs if (n, way) not in done
    ]
    records = [stamp(info, record) for record in with_efficiency(records)]
    save_records(result_path(Path(out), info), info, records)
    return make_document(info, records), lines


def launch_command(plan: ScalingPlan, answer: Path) -> list[str]:
    """The command line of the group that measures a plan and writes records to ``answer``."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={plan.processes}", "-m", "fastswin.bench.train_scaling_worker",
        "--answer", str(answer), *plan.words(),
    ]  # fmt: skip


def _read_records(answer: Path) -> list[Record]:
    return json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else []


class _Announcer:
    """Tells of records as they come, so that a run that is cut off has said what it found."""

    def __init__(self, answer: Path, progress: Callable[[str], None]) -> None:
        self._answer, self._progress, self._told = answer, progress, 0

    def look(self) -> None:
        records = _read_records(self._answer)
        for record in records[self._told :]:
            self._progress(
                f"{record['gpus']} GPUs, averaged by {record['averaging']}: "
                f"{record['median_ms']:.2f} ms"
            )
        self._told = len(records)


def with_efficiency(records: Sequence[Record]) -> list[Record]:
    """Add ``efficiency`` to records of one variant; None where the single-GPU one is missing."""
    single = next((r["images_per_s"] for r in records if r["gpus"] == 1), None)
    return [
        r | {"efficiency": r["images_per_s"] / (r["gpus"] * single) if single else None}
        for r in records
    ]


def table_lines(document: Document) -> list[str]:
    """One readable line per number of GPUs."""
    return [
        f"{r['case']} {r['dtype']} batch {r['batch']} per GPU, {r['gpus']} GPUs, averaged by "
        f"{r['averaging']}: "
        f"{r['images_per_s']:.0f} img/s, {r['median_ms']:.2f} ms, efficiency "
        + ("-" if r["efficiency"] is None else f"{r['efficiency']:.1%}")
        for r in document["records"]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite from the command line; 0 measured, 1 not all, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m fastswin.bench.train_scaling")
    add_options(parser)
    parser.add_argument("--limit-s", type=float, default=300.0, help="for all numbers together")
    parser.add_argument("--out", type=Path, default=DEFAULT_ROOT)
    options = parser.parse_args(arguments)
    try:
        document, lines = run(
            read_plan(options), options.out, options.limit_s,
            lambda line: print(line, file=sys.stderr, flush=True),
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(table_lines(document)))
    for line in lines:
        print(f"not measured: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
