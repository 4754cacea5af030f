"""``fastswin tune``: named models at a range of batches on this machine's GPU, then the proof.

The proof is whole models: with the heuristics and with rows of the table, side by side, same
weights; rows that bring nothing do not answer (tune_select.py). Without the command line's
packages:

    python -m fastswin.bench.tune_models --models NAME,NAME:8:32 --batches 1-64 --out table.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fastswin.bench.failures import release_memory
from fastswin.bench.suites import choose_device
from fastswin.bench.timing import Clock, make_clock
from fastswin.bench.tune import Tuner, TuneResult
from fastswin.bench.tune_compile import CompilePool
from fastswin.bench.tune_select import Case, Comparison, Proposal, Selection
from fastswin.bench.tune_units import Unit, problems_of, propose, rows_of, tuning_group
from fastswin.bench.tune_whole import Measured, WholeModel, heuristic_plan
from fastswin.engine.engine import GRAPH_BATCH_SIZES
from fastswin.engine.precision import find_precision
from fastswin.models import find_variant
from fastswin.tuning.card import card_of
from fastswin.tuning.document import triton_version
from fastswin.tuning.table import TuningTable

#: Batches that are tuned first, so that a deadline leaves the most asked for.
FIRST_BATCHES = (32, 8, 64, 1)

#: Part of the time after which no launch is searched any more, and after which no model is
#: compared; the rest is for the other half precision.
SEARCH_SHARE, COMPARISON_SHARE = 0.55, 0.93


def parse_batches(text: str) -> list[int]:
    """``1-64`` is the engine's ladder of captured batches in that range, ``1,24`` those two.

    Raises:
        ValueError: not numbers of at least 1, or a range without a batch of the ladder.
    """
    batches: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or int(low) < 1:
            raise ValueError(f"batches must look like 1-64 or 1,8,32, got {text!r}")
        rungs = [b for b in GRAPH_BATCH_SIZES if int(low) <= b <= int(high or low)]
        found = rungs if dash else [int(low)]
        if not found:
            raise ValueError(f"batches: {part.strip()} holds none of {GRAPH_BATCH_SIZES}")
        batches += found
    return list(dict.fromkeys(batches))


def parse_models(models: Sequence[str], batches: Sequence[int]) -> list[Case]:
    """Models and batches in the order in which they are tuned.

    Args:
        models: names; ``NAME:8:32`` has batches of its own.
        batches: of the others.

    Raises:
        ValueError: an unknown name, or a batch that is no number of at least 1.
    """
    cases: list[Case] = []
    for text in models:
        name, *own = text.split(":")
        find_variant(name)
        if not all(batch.isdigit() and int(batch) >= 1 for batch in own):
            raise ValueError(f"a model's own batches must look like NAME:8:32, got {text!r}")
        cases += [(name, int(batch)) for batch in own or batches]
    order = {batch: index for index, batch in enumerate(FIRST_BATCHES)}
    return sorted(dict.fromkeys(cases), key=lambda case: (order.get(case[1], 9), case[1]))


def tune_models(
    models: Sequence[str],
    batches: Sequence[int],
    precision: str,
    out: Path,
    *,
    device: str | None = None,
    workers: int | None = None,
    deadline_s: float = 480.0,
    compare: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[TuneResult, list[Comparison]]:
    """Tune models into the table at ``out``, which is continued if it exists.

    Args:
        models: names of variants, or ``NAME:8:32`` with batches of their own.
        batches: from :func:`parse_batches`, for the others.
        precision: "fp16", "bf16", "fp32" or "tf32".
        out: the table.
        device: "cuda" or "cuda:N"; None takes the current GPU.
        workers: compiling processes; None takes all cores but two.
        deadline_s: seconds for everything.
        compare: whether whole models decide which rows answer; without, all do.
        progress: receives readable lines.

    Raises:
        ValueError: an unknown model or precision, no worker, or a table at ``out`` of another card
            or schema.
        RuntimeError: there is no GPU.
    """
    start = time.monotonic()
    cases = parse_models(models, batches)
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    target, _ = choose_device(device)
    if target.type != "cuda":
        raise RuntimeError("tuning needs an NVIDIA GPU, and PyTorch finds none")
    target = torch.device("cuda", target.index or torch.cuda.current_device())
    find_precision(precision, target)
    share = SEARCH_SHARE if compare else 1.0
    workers = workers or max(1, (os.cpu_count() or 1) - 2)
    clock = make_clock(target)
    with torch.cuda.device(target), CompilePool(workers) as pool:
        tuner = Tuner(
            Path(out), card_of(target), target, clock, pool, triton_version(),
            start + share * deadline_s, "untried" if compare else "taken", progress,
        )  # fmt: skip
        whole = Whole(tuner, cases, precision, progress)
        tuner.start(whole.groups)
        whole.build()
        result = tuner.run(whole.groups)
        progress(f"search: {time.monotonic() - start:.0f} s, {result.left} launches left")
        if not compare:
            return result, []
        release_memory()
        comparisons = whole.decide(start + COMPARISON_SHARE * deadline_s, clock)
        progress(f"whole models: {time.monotonic() - start:.0f} s")
        tuner.check_twins(start + deadline_s)
    return dataclasses.replace(result, document=tuner.document), comparisons


class Whole:
    """Named models of one run, and what their plans ask of a table.

    Args:
        tuner: whose table is asked.
        cases: models and batches.
        precision: of the models.
        progress: receives readable lines.
    """

    def __init__(
        self,
        tuner: Tuner,
        cases: Sequence[Case],
        precision: str,
        progress: Callable[[str], None],
    ) -> None:
        self.tuner, self.cases, self.precision, self.progress = tuner, cases, precision, progress
        device = tuner.device
        self.plans = {
            (name, batch): heuristic_plan(find_variant(name), batch, precision, device)
            for name, batch in cases
        }
        self.groups = [
            tuning_group(find_variant(name), self.plans[name, batch], precision)
            for name, batch in cases
        ]
        self._models: dict[str, WholeModel] = {}
        for (name, batch), plan in self.plans.items():
            few = [str(s.stage) for s in plan.stages if s.few_rows]
            if few:
                progress(f"{name} batch {batch}: stages {', '.join(few)} have few rows: not tuned")

    def build(self) -> None:
        """Weights of all models, while the first candidates are compiled.

        Their plans are compiled later: after the search most of their kernels are in the cache.
        """
        for name, _ in self.cases:
            if name not in self._models:
                self._models[name] = WholeModel(name, self.precision, self.tuner.device)

    def decide(self, deadline: float, clock: Clock) -> list[Comparison]:
        """Let whole models decide, and write it into the table.

        Args:
            deadline: no model is measured after this (of ``time.monotonic``).
            clock: of the device.
        """
        proposals: dict[Case, Proposal] = {}
        for (name, batch), plan in self.plans.items():
            config = find_variant(name)
            units = propose(config, plan, self.precision, self.tuner.times)
            asked = problems_of(config, plan, self.precision)
            proposals[name, batch] = Proposal(units, asked)

        def measure(
            case: Case, contenders: Sequence[tuple[Unit, ...]], captures: int
        ) -> tuple[float, list[Measured]]:
            tables = {units: self._table(units) for units in contenders}
            base_ms, found = self._models[case[0]].measure(case[1], tables, clock, captures)
            return base_ms, [found[units] for units in contenders]

        verdicts, comparisons = Selection(proposals, measure, deadline, self.progress).run()
        self.tuner.decide(verdicts, comparisons, self.precision)
        return comparisons

    def _table(self, units: tuple[Unit, ...]) -> TuningTable:
        document = rows_of(self.tuner.document, units, "taken")
        return TuningTable(document, self.tuner.card, self.tuner.triton, "trial")


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune from the command line; prints a summary as JSON. Exit code 1: something is left."""
    parser = argparse.ArgumentParser(prog="python -m fastswin.bench.tune_models")
    parser.add_argument("--models", required=True, help="comma-separated names, or NAME:8:32")
    parser.add_argument("--batches", default="1-64")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--out", type=Path, default=Path("fastswin-tuning.json"))
    parser.add_argument("--workers", type=int)
    parser.add_argument("--deadline-s", type=float, default=480.0)
    parser.add_argument("--no-compare", action="store_true")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    result, comparisons = tune_models(
        options.models.split(","), parse_batches(options.batches), options.precision, options.out,
        workers=options.workers, deadline_s=options.deadline_s, compare=not options.no_compare,
        progress=lambda line: print(
            f"[{time.monotonic() - start:.0f}] {line}", file=sys.stderr, flush=True
        ),
    )  # fmt: skip
    for comparison in comparisons:
        print(json.dumps(dataclasses.asdict(comparison)))
    counts = {"tuned": result.tuned, "known": result.known, "left": result.left}
    print(json.dumps(counts | {"rejected": len(result.rejected)}))
    return 1 if result.left else 0


if __name__ == "__main__":
    raise SystemExit(main())
