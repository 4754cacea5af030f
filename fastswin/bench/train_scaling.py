"""``python -m fastswin.bench.train_scaling``: DDP over 1, 2, 4, ... GPUs of one machine.

    efficiency = images per second on n GPUs / (n * images per second on one)

The program starts ``torch.distributed.run`` once per number of GPUs; each of its processes is this
module again with ``--worker``. Batch is per GPU. Between samples all processes meet, so that a
sample is the time of the slowest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastswin.bench.problems import Problem, parse_batches, seeded_images
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
from fastswin.bench.source import build_source
from fastswin.bench.suites import choose_device, clock_precision, measure_device
from fastswin.bench.timing import summarise
from fastswin.bench.train_contenders import build_trainee

SUITE = "scaling"
WARMUP_STEPS, STEPS_PER_SAMPLE = 10, 5


def worker(problem: Problem, variant: str, seconds: float, device: torch.device) -> Record | None:
    """Train in this process of a group that is initialised; the record on rank 0."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    images = seeded_images(problem, problem.batch, device, seed=rank).float()
    trainee = build_trainee(variant, build_source(problem), problem.dtype, device, images)
    ids = [device.index] if device.type == "cuda" else None
    module = trainee.forward if isinstance(trainee.forward, nn.Module) else trainee.model
    ddp = nn.parallel.DistributedDataParallel(module, device_ids=ids, gradient_as_bucket_view=True)
    trainee.forward = ddp
    labels = torch.arange(problem.batch, device=device) % problem.swin_config.num_classes
    for _ in range(WARMUP_STEPS if device.type == "cuda" else 1):
        trainee.step(images, labels)
    samples: list[float] = []
    began = time.perf_counter()
    go_on = torch.ones((), device=device)
    while bool(go_on):
        torch.distributed.barrier(device_ids=ids)
        start = time.perf_counter()
        for _ in range(STEPS_PER_SAMPLE):
            trainee.step(images, labels)
        if device.type == "cuda":
            torch.cuda.synchronize()
        torch.distributed.barrier(device_ids=ids)
        samples.append((time.perf_counter() - start) / STEPS_PER_SAMPLE * 1e3)
        go_on.fill_(float(time.perf_counter() - began < seconds))
        torch.distributed.broadcast(go_on, 0)
    if rank:
        return None
    timing = summarise(samples, None, False, STEPS_PER_SAMPLE)
    return {
        "case": problem.model, "dtype": problem.dtype, "batch": problem.batch,
        "variant": f"{variant}-{world}gpu", "direction": "step", "median_ms": timing.median_ms,
        "p20_ms": timing.p20_ms, "p80_ms": timing.p80_ms, "count": timing.count, "gpus": world,
        "images_per_s": world * problem.batch / timing.median_ms * 1e3,
    }  # fmt: skip


def with_efficiency(records: Sequence[Record]) -> list[Record]:
    """Add ``efficiency`` to records of one variant; None where the single-GPU one is missing."""
    single = next((r["images_per_s"] for r in records if r["gpus"] == 1), None)
    return [
        r | {"efficiency": r["images_per_s"] / (r["gpus"] * single) if single else None}
        for r in records
    ]


def run(
    problem: Problem,
    gpus: Sequence[int],
    variant: str = "fastswin",
    out: str | Path = DEFAULT_ROOT,
    seconds: float = 5.0,
    limit_s: float = 300.0,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[Document, list[str]]:
    """Measure each number of GPUs in its own group of processes.

    Args:
        problem: model, dtype and batch per GPU.
        gpus: numbers of GPUs, each at most what the machine has.
        variant: of :data:`~fastswin.bench.train_contenders.VARIANTS`.
        out: root of the results.
        seconds: of samples for each number.
        limit_s: after which one group is stopped.
        progress: receives readable lines.

    Returns:
        The document of this run, and a line for each number that could not be measured.

    Raises:
        ValueError: a number of GPUs that the machine does not have.
    """
    found = torch.cuda.device_count()
    if found and max(gpus) > found:
        raise ValueError(f"gpus must be at most {found}, which this machine has, got {max(gpus)}")
    target, lines = choose_device(None)
    ceilings = measure_device(target, [problem])
    info = make_run_info(
        SUITE, target, ceilings.copy_tbs, ceilings.gemm_tflops[clock_precision(target)]
    )
    records: list[Record] = []
    for count in sorted(set(gpus)):
        progress(f"{problem} {variant}: {count} processes")
        with tempfile.TemporaryDirectory() as scratch:
            answer = Path(scratch, "record.json")
            command = launch_command(problem, count, variant, seconds, answer)
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=limit_s, check=False
                )
            except subprocess.TimeoutExpired:
                lines.append(f"{count} GPUs: not done after {limit_s:g} s")
                continue
            if done.returncode or not answer.exists():
                last = (done.stderr.strip().splitlines() or ["no output"])[-1]
                lines.append(f"{count} GPUs: failed: {last}")
                continue
            records.append(json.loads(answer.read_text(encoding="utf-8")))
    records = [stamp(info, record) for record in with_efficiency(records)]
    save_records(result_path(Path(out), info), info, records)
    return make_document(info, records), lines


def launch_command(
    problem: Problem, count: int, variant: str, seconds: float, answer: Path
) -> list[str]:
    """The command line of one group of ``count`` processes."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={count}", "-m", "fastswin.bench.train_scaling", "--worker", str(answer),
        "--model", problem.model, "--dtype", problem.dtype, "--batch", str(problem.batch),
        "--variant", variant, "--seconds", str(seconds),
    ]  # fmt: skip


def _run_worker(options: argparse.Namespace) -> int:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        problem = Problem(options.model, options.dtype, options.batch)
        record: Any = worker(problem, options.variant, options.seconds, device)
        if record is not None:
            options.worker.write_text(json.dumps(record), encoding="utf-8")
    finally:
        torch.distributed.destroy_process_group()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite from the command line; 0 measured, 1 not all, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m fastswin.bench.train_scaling")
    parser.add_argument("--model", default="swin_tiny_patch4_window7_224")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--batch", type=int, default=128, help="per GPU")
    parser.add_argument("--variant", default="fastswin")
    parser.add_argument("--gpus", default="1,2,4", help="comma-separated numbers")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--limit-s", type=float, default=300.0, help="per number of GPUs")
    parser.add_argument("--out", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        return _run_worker(options)
    try:
        document, lines = run(
            Problem(options.model, options.dtype, options.batch),
            parse_batches(options.gpus, "gpus"), options.variant, options.out, options.seconds,
            options.limit_s, lambda line: print(line, file=sys.stderr, flush=True),
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(table_lines(document)))
    for line in lines:
        print(f"not measured: {line}", file=sys.stderr)
    return 1 if lines else 0


def table_lines(document: Document) -> list[str]:
    """One readable line per number of GPUs."""
    return [
        f"{r['case']} {r['dtype']} batch {r['batch']} per GPU, {r['gpus']} GPUs: "
        f"{r['images_per_s']:.0f} img/s, {r['median_ms']:.2f} ms, efficiency "
        + ("-" if r["efficiency"] is None else f"{r['efficiency']:.1%}")
        for r in document["records"]
    ]


if __name__ == "__main__":
    raise SystemExit(main())
