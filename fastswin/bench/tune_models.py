"""``fastswin tune``: named models at a range of batches on this machine's GPU, then the proof.

The proof is the engine itself: with the heuristics and with the table, side by side, same weights.
Without the command line's packages:

    python -m fastswin.bench.tune_models --models NAME,NAME --batches 1-64 --out table.json
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

from fastswin.bench.failures import describe, release_memory
from fastswin.bench.problems import Problem, seeded_images
from fastswin.bench.source import perturb_weights
from fastswin.bench.suites import choose_device
from fastswin.bench.timing import Candidate, Timing, make_clock, measure
from fastswin.bench.tune import Tuner, TuneResult, tuning_group
from fastswin.bench.tune_compile import CompilePool
from fastswin.engine import Engine
from fastswin.engine.engine import GRAPH_BATCH_SIZES
from fastswin.engine.precision import find_precision
from fastswin.models import SwinTransformer, find_variant
from fastswin.tuning.card import card_of
from fastswin.tuning.table import triton_version

#: Batches that are tuned first, so that a deadline leaves the most asked for.
FIRST_BATCHES = (1, 32, 8, 64)

#: Part of the time that is kept for comparing engines at the end.
COMPARISON_SHARE = 0.15


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One model and batch with the heuristics and with the table.

    Attributes:
        model, batch: the problem.
        heuristic_ms, tuned_ms: medians of one run; None with the reason in ``message``.
        max_abs_diff: largest difference between the two engines' logits.
        message: why there are no numbers, else empty.
    """

    model: str
    batch: int
    heuristic_ms: float | None
    tuned_ms: float | None
    max_abs_diff: float | None
    message: str = ""


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
        models: names of variants.
        batches: from :func:`parse_batches`.
        precision: "fp16", "bf16", "fp32" or "tf32".
        out: the table.
        device: "cuda" or "cuda:N"; None takes the current GPU.
        workers: compiling processes; None takes all cores but two.
        deadline_s: seconds for everything.
        compare: whether to measure the engine with and without the table at the end.
        progress: receives readable lines.

    Raises:
        ValueError: an unknown model or precision, or a table at ``out`` of another card or schema.
        RuntimeError: there is no GPU.
    """
    start = time.monotonic()
    configs = [find_variant(name) for name in models]
    target, _ = choose_device(device)
    if target.type != "cuda":
        raise RuntimeError("tuning needs an NVIDIA GPU, and PyTorch finds none")
    target = torch.device("cuda", target.index or torch.cuda.current_device())
    find_precision(precision, target)
    ordered = sorted(batches, key=lambda b: (b not in FIRST_BATCHES, b))
    share = 1 - COMPARISON_SHARE if compare else 1.0
    workers = workers or max(1, (os.cpu_count() or 1) - 2)
    with torch.cuda.device(target), CompilePool(workers) as pool:
        tuner = Tuner(
            Path(out), card_of(target), target, make_clock(target), pool,
            triton_version(), start + share * deadline_s, progress,
        )  # fmt: skip
        result = tuner.run([tuning_group(configs, batch, precision) for batch in ordered])
    release_memory()
    comparisons: list[Comparison] = []
    for name in models if compare else ():
        comparisons += compare_engines(
            name, ordered, precision, Path(out), target, start + deadline_s
        )
    return result, comparisons


def compare_engines(
    name: str,
    batches: Sequence[int],
    precision: str,
    table: Path,
    device: torch.device,
    deadline: float,
    seconds: float = 0.3,
) -> list[Comparison]:
    """Time one model with the heuristics and with a table, on the same seeded weights."""
    model = SwinTransformer(find_variant(name)).eval()
    perturb_weights(model)
    engines = {
        "heuristic": Engine(model, precision, device=device, tuning="off"),  # type: ignore[arg-type]
        "tuned": Engine(model, precision, device=device, tuning=table),  # type: ignore[arg-type]
    }
    found: list[Comparison] = []
    for batch in batches:
        if time.monotonic() > deadline:
            found.append(Comparison(name, batch, None, None, None, "the deadline is over"))
            continue
        try:
            found.append(_compare(name, batch, precision, engines, device, seconds))
        except Exception as error:  # out of memory at one batch; the others are measured
            found.append(Comparison(name, batch, None, None, None, describe(error).message))
    return found


def _compare(
    name: str,
    batch: int,
    precision: str,
    engines: dict[str, Engine],
    device: torch.device,
    seconds: float,
) -> Comparison:
    images = seeded_images(Problem(name, precision, batch), batch, device, seed=0)
    logits = {key: engine(images).float() for key, engine in engines.items()}
    difference = (logits["tuned"] - logits["heuristic"]).abs().max().item()

    def call(engine: Engine) -> Callable[[], object]:
        return lambda: engine(images)

    contenders = [Candidate(key, call(engine)) for key, engine in engines.items()]
    times = measure(contenders, make_clock(device), seconds=seconds)
    medians: dict[str, float] = {}
    for key, timing in times.items():
        if not isinstance(timing, Timing):
            raise RuntimeError(timing.message)
        medians[key] = timing.median_ms
    return Comparison(name, batch, medians["heuristic"], medians["tuned"], difference)


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune from the command line; prints a summary as JSON. Exit code 1: something is left."""
    parser = argparse.ArgumentParser(prog="python -m fastswin.bench.tune_models")
    parser.add_argument("--models", required=True, help="comma-separated names")
    parser.add_argument("--batches", default="1-64")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--out", type=Path, default=Path("fastswin-tuning.json"))
    parser.add_argument("--workers", type=int)
    parser.add_argument("--deadline-s", type=float, default=480.0)
    parser.add_argument("--no-compare", action="store_true")
    options = parser.parse_args(arguments)
    result, comparisons = tune_models(
        options.models.split(","), parse_batches(options.batches), options.precision, options.out,
        workers=options.workers, deadline_s=options.deadline_s, compare=not options.no_compare,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    for comparison in comparisons:
        print(json.dumps(dataclasses.asdict(comparison)))
    counts = {"tuned": result.tuned, "known": result.known, "left": result.left}
    print(json.dumps(counts | {"rejected": len(result.rejected)}))
    return 1 if result.left else 0


if __name__ == "__main__":
    raise SystemExit(main())
