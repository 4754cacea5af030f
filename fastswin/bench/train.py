"""``python -m fastswin.bench.train``: suite ``train``, optimiser steps side by side.

For each model and batch: gradients of every contender against fp32 eager first, then one step's
time (contenders in turn), images per second, peak memory and the dtype of the residual stream.
A contender whose gradients are worse than eager's in the same precision gets no number.

Graphs keep what their memory pool ever held. ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``
lets its free pieces join; every record says how the allocator was configured.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fastswin.bench.failures import Failure, describe, release_memory
from fastswin.bench.memory import held_mib, peak_mib
from fastswin.bench.problems import Problem, parse_batches, parse_names, seeded_images
from fastswin.bench.record import (
    DEFAULT_ROOT,
    Document,
    Record,
    RunInfo,
    make_document,
    make_run_info,
    record_key,
    result_path,
    save_records,
    stamp,
)
from fastswin.bench.source import Source, build_source
from fastswin.bench.suites import choose_device, clock_precision, measure_device
from fastswin.bench.tables import Table, print_table
from fastswin.bench.timing import Candidate, check_arguments, make_clock, measure
from fastswin.bench.train_contenders import (
    DTYPES,
    VARIANTS,
    Trainee,
    build_trainee,
    stream_dtype,
)
from fastswin.models import list_models

SUITE = "train"
DEFAULT_MODELS = (
    "swin_tiny_patch4_window7_224", "swin_base_patch4_window7_224", "swinv2_tiny_window8_256",
)  # fmt: skip
DEFAULT_BATCH = 128

#: Images of the gradient check.
CHECK_BATCH = 4

#: Error of all gradients together, over eager's in the same precision.
GATE = 1.5

#: Relative error that fp32 contenders may have.
FP32_GATE = 1e-3

#: Steps before memory is looked at: ``reduce-overhead`` records its graphs in the second one.
SETTLING_STEPS = 2

#: Environment variables that configure PyTorch's allocator of device memory.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """A finished run: this run's records, the file they went to, and what went wrong."""

    document: Document
    path: Path
    problems_found: tuple[str, ...]


def run(
    problems: Sequence[Problem],
    variants: Sequence[str] | None = None,
    device: str | torch.device | None = None,
    out: str | Path = DEFAULT_ROOT,
    seconds: float = 3.0,
    deadline_s: float | None = None,
    progress: Progress = lambda line: None,
) -> TrainResult:
    """Check and time every contender on every problem.

    Args:
        problems: model, autocast dtype and batch each.
        variants: of :data:`~fastswin.bench.train_contenders.VARIANTS`; None takes all.
        device: "cuda", "cpu" or a torch device; None takes the GPU where there is one.
        out: root of the results.
        seconds: time for each contender's samples.
        deadline_s: problems that would start later than this are skipped.
        progress: receives readable lines.

    Raises:
        ValueError, RuntimeError: an argument is off; nothing is run or written.
    """
    start = time.monotonic()
    names = list(VARIANTS) if variants is None else list(variants)
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"variants must be among {', '.join(VARIANTS)}, got {name!r}")
    for problem in problems:
        if problem.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {problem.dtype!r}")
    check_arguments(seconds, None, None)
    target, notes = choose_device(device)
    ceilings = measure_device(target, problems)
    info = make_run_info(
        SUITE, target, ceilings.copy_tbs, ceilings.gemm_tflops[clock_precision(target)]
    )
    path = result_path(Path(out), info)
    save_records(path, info, [])
    lines = list(notes)
    records: list[Record] = []
    for problem in problems:
        if deadline_s is not None and time.monotonic() - start > deadline_s:
            lines.append(f"{problem}: skipped: deadline of {deadline_s:g} s passed")
            continue
        release_memory()
        try:
            found, wrong = _measure(problem, names, target, seconds, info, progress)
        except Exception as error:
            found, wrong = {}, {name: describe(error) for name in names}
        red = [
            record_key({"case": problem.model, "dtype": problem.dtype, "batch": problem.batch,
                        "variant": name, "direction": "step"})
            for name, failure in wrong.items() if failure.status == "red"
        ]  # fmt: skip
        save_records(path, info, found.values(), red)
        records += found.values()
        for name, failure in wrong.items():
            lines.append(f"{problem} {name}: {failure.status}: {failure.message}")
            progress(lines[-1])
    return TrainResult(make_document(info, records), path, tuple(lines))


def _measure(
    problem: Problem,
    names: Sequence[str],
    device: torch.device,
    seconds: float,
    info: RunInfo,
    progress: Progress,
) -> tuple[dict[str, Record], dict[str, Failure]]:
    """Records and failures by variant."""
    source = build_source(problem)
    images, labels = _batch(problem, device, problem.batch)
    gate = _Gate(problem, source, device)
    trainees: dict[str, Trainee] = {}
    facts: dict[str, Record] = {}
    failures: dict[str, Failure] = {}
    for name in names:
        progress(f"{problem} {name}: building")
        held, began = held_mib(), time.perf_counter()
        try:
            trainee = build_trainee(name, source, problem.dtype, device, images)
            facts[name] = {"gradient_error": gate.error(trainee), "gradient_gate": gate.bound}
            facts[name]["stream_dtypes"] = stream_dtype(trainee, images[:CHECK_BATCH])
            if not facts[name]["gradient_error"] <= gate.bound:
                failures[name] = Failure(
                    "red", f"gradient error {facts[name]['gradient_error']:.2e} > {gate.bound:.2e}"
                )
                continue
            loss = trainee.step(images, labels)  # compiles, and makes the optimiser's state
            facts[name]["first_loss"] = float(loss)
            for _ in range(SETTLING_STEPS if device.type == "cuda" else 0):
                trainee.step(images, labels)
            facts[name]["build_s"] = time.perf_counter() - began
            if device.type == "cuda":
                facts[name]["peak_mib"] = peak_mib(_stepper(trainee, images, labels), held)
            trainees[name] = trainee
        except Exception as error:
            failures[name] = describe(error)
            release_memory()
    candidates = [
        Candidate(name, _stepper(trainee, images, labels), peak_mib=0.0)
        for name, trainee in trainees.items()
    ]
    timings = measure(candidates, make_clock(device), seconds=seconds)
    records: dict[str, Record] = {}
    for name, trainee in trainees.items():
        timing = timings[name]
        if isinstance(timing, Failure):
            failures[name] = timing
            continue
        if not bool(trainee.loss(images, labels).isfinite()):
            failures[name] = Failure("red", "the loss is NaN or infinite after the timed steps")
            continue
        record: Record = {
            "case": problem.model, "dtype": problem.dtype, "batch": problem.batch, "variant": name,
            "direction": "step", "median_ms": timing.median_ms, "p20_ms": timing.p20_ms,
            "p80_ms": timing.p80_ms, "count": timing.count, "peak_mib": None,
            "images_per_s": problem.batch / timing.median_ms * 1e3,
            "optimizer": "AdamW fused" if device.type == "cuda" else "AdamW",
            "framework": source.framework, "allocator": allocator_settings(),
        }  # fmt: skip
        records[name] = stamp(info, record | facts[name])
        progress(f"{problem} {name}: {timing.median_ms:.4g} ms")
    return records, failures


def allocator_settings() -> str:
    """How the user configured PyTorch's allocator of device memory; "default" where not."""
    found = [os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)]
    return found[0] if found else "default"


def _stepper(
    trainee: Trainee, images: torch.Tensor, labels: torch.Tensor
) -> Callable[[], torch.Tensor]:
    return lambda: trainee.step(images, labels)


class _Gate:
    """Gradients of fp32 eager, and how far from them a contender may be."""

    def __init__(self, problem: Problem, source: Source, device: torch.device) -> None:
        self.images, self.labels = _batch(problem, device, min(problem.batch, CHECK_BATCH))
        self.exact = _gradients("eager", source, "fp32", device, self.images, self.labels)
        self.bound = FP32_GATE
        if problem.dtype != "fp32":
            eager = _gradients("eager", source, problem.dtype, device, self.images, self.labels)
            self.bound = GATE * self._distance(eager)

    def error(self, trainee: Trainee) -> float:
        """Relative error of all gradients together."""
        plain = dataclasses.replace(trainee, forward=trainee.model)
        return self._distance(plain.gradients(self.images, self.labels))

    def _distance(self, gradients: dict[str, torch.Tensor]) -> float:
        own = {name.removeprefix("swin.").replace(".attention.", "."): g
               for name, g in gradients.items()}  # fmt: skip
        exact = {name.removeprefix("swin.").replace(".attention.", "."): g
                 for name, g in self.exact.items()}  # fmt: skip
        if own.keys() != exact.keys():
            return float("inf")
        wrong = sum((own[n] - g).double().square().sum() for n, g in exact.items())
        size = sum(g.double().square().sum() for g in exact.values())
        return float((wrong / size) ** 0.5)


def _gradients(
    variant: str, source: Source, dtype: str, device: torch.device, images: torch.Tensor,
    labels: torch.Tensor,
) -> dict[str, torch.Tensor]:  # fmt: skip
    return build_trainee(variant, source, dtype, device, images).gradients(images, labels)


def _batch(problem: Problem, device: torch.device, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    images = seeded_images(problem, count, device, seed=0).float()
    labels = torch.arange(count, device=device) * 7 % problem.swin_config.num_classes
    return images, labels


def make_table(document: Document) -> Table:
    """One row per record: time, images per second, memory, dtype of the stream."""
    rows = []
    for r in document["records"]:
        key = ("case", "dtype", "batch")
        base = next(
            (o for o in document["records"]
             if o["variant"] == "compile" and all(o[k] == r[k] for k in key)), None,
        )  # fmt: skip
        rows.append((
            r["case"], r["dtype"], str(r["batch"]), r["variant"], f"{r['median_ms']:.2f}",
            f"{r['images_per_s']:.0f}",
            "-" if base is None else f"{base['median_ms'] / r['median_ms']:.2f}x",
            "-" if r["peak_mib"] is None else f"{r['peak_mib']:.0f}",
            ", ".join(dict.fromkeys(r["stream_dtypes"])) or "-", f"{r['gradient_error']:.1e}",
        ))  # fmt: skip
    header = ("model", "dtype", "batch", "variant", "ms", "img/s", "over compile", "peak MiB",
              "residual stream", "gradient error")  # fmt: skip
    caption = (
        f"{document['gpu']}; torch {document['torch']}; forward, backward and AdamW; residual "
        "stream: dtypes after the blocks, in order."
    )
    return Table(f"train on {document['gpu']}", header, tuple(rows), caption)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite from the command line; 0 all measured and right, 1 not, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m fastswin.bench.train", description=__doc__)
    parser.add_argument("--models", help=f"comma-separated; default: {','.join(DEFAULT_MODELS)}")
    parser.add_argument("--dtype", default="bf16", help=f"one of {','.join(DTYPES)}")
    parser.add_argument("--batches", default=str(DEFAULT_BATCH))
    parser.add_argument("--variants", help=f"of {','.join(VARIANTS)}; default: all")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--seconds", type=float, default=3.0, help="per contender")
    parser.add_argument("--deadline-s", type=float, help="start no problem later than this")
    options = parser.parse_args(arguments)
    try:
        names = parse_names(options.models or ",".join(DEFAULT_MODELS), list_models(), "models")
        problems = [
            Problem(name, options.dtype, batch)
            for name in names for batch in parse_batches(options.batches)
        ]  # fmt: skip
        variants = options.variants and parse_names(options.variants, list(VARIANTS), "variants")
        result = run(
            problems, variants, options.device, options.out, options.seconds, options.deadline_s,
            lambda line: print(line, file=sys.stderr, flush=True),
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_table(make_table(result.document))
    for line in result.problems_found:
        print(f"not measured: {line}", file=sys.stderr)
    return 1 if result.problems_found else 0


if __name__ == "__main__":
    raise SystemExit(main())
