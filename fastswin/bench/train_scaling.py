"""``python -m fastswin.bench.train_scaling``: DDP over 1, 2, 4, ... GPUs of one machine.

    efficiency = images per second on n GPUs / (n * images per second on one)

``torch.distributed.run`` starts as many processes as the largest number asks for; each is this
module again with ``--worker``, builds (and captures) the model once and takes part in the numbers
that it belongs to, one after another. A single GPU trains without DDP, as one would. With
``--averaging graph`` (or ``ddp,graph``) each number captures a model of its own, whose graphs
average the gradients themselves (``capture_training(process_group=...)``), instead of DDP. Batch is
per GPU. Between samples the processes meet, so that a sample is the time of the slowest; before
any, their parameters must be equal after steps on different images, or gradients were not summed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastswin.bench.problems import Problem, parse_batches, seeded_images
from fastswin.bench.process_group import run_group, tell_stacks_on_termination
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
from fastswin.bench.train_contenders import Trainee, build_trainee
from fastswin.data.atomic import write_text

SUITE = "scaling"
WARMUP_STEPS, STEPS_PER_SAMPLE = 10, 5

#: Who averages gradients: DistributedDataParallel or the captured step.
AVERAGING = ("ddp", "graph")


def worker(
    problem: Problem,
    variant: str,
    gpus: Sequence[int],
    seconds: float,
    device: torch.device,
    report: Callable[[list[Record]], None] = lambda records: None,
    averaging: Sequence[str] = AVERAGING[:1],
) -> list[Record]:
    """Train in this process of a group that is initialised.

    Args:
        problem: model, dtype and batch per GPU.
        variant: of :data:`~fastswin.bench.train_contenders.VARIANTS`.
        gpus: numbers of processes to train on, each at most the group's size.
        seconds: of samples for each number.
        device: this process's.
        report: receives what is known after each number, on rank 0.
        averaging: ways of :data:`AVERAGING`, one after another.

    Returns:
        A record for each number and way, on rank 0; empty elsewhere.

    Raises:
        RuntimeError: the processes' parameters differ after the warm-up.
    """
    rank = dist.get_rank()
    images = seeded_images(problem, problem.batch, device, seed=rank).float()
    labels = torch.arange(problem.batch, device=device) % problem.swin_config.num_classes
    # captured before the first collective, whose watchdog asks the GPU from another thread
    source = build_source(problem)
    trainee = build_trainee(variant, source, problem.dtype, device, images)
    own = trainee.forward if isinstance(trainee.forward, nn.Module) else trainee.model
    records: list[Record] = []
    groups = {count: _Group(count, device) for count in sorted(set(gpus))}
    for count, way in _runs(gpus, averaging):
        group, training = groups[count], trainee
        if rank < count:
            if way == "graph":
                training = build_trainee(
                    variant, source, problem.dtype, device, images, group.group
                )
            elif way == "ddp":
                trainee.forward = group.parallel(own)
            samples = _samples(training, images, labels, group, seconds)
            if rank == 0:
                records.append(_record(problem, variant, count, samples, way))
                report(records)
            trainee.forward = own
            gc.collect()  # DDP's hooks on the parameters go with it
        dist.barrier(device_ids=_ids(device))
    return records


def _runs(gpus: Sequence[int], averaging: Sequence[str]) -> list[tuple[int, str]]:
    """Numbers of GPUs with how gradients are averaged, a single one first."""
    alone = [(1, "none")] if 1 in gpus else []
    return alone + [(n, way) for way in averaging for n in sorted(set(gpus)) if n > 1]


class _Group:
    """The first ``count`` processes; made by all of them."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self.group: Any = dist.new_group(list(range(count)))

    def parallel(self, module: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(
            module, device_ids=_ids(self.device), process_group=self.group,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # a Swin's are constants
        )  # fmt: skip

    def meet(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.count > 1:
            dist.barrier(self.group, device_ids=_ids(self.device))

    def agrees_to_go_on(self, mine: bool) -> bool:
        """Rank 0's answer, in every process."""
        answer = torch.tensor(float(mine), device=self.device)
        if self.count > 1:
            dist.broadcast(answer, 0, self.group)
        return bool(answer)

    def same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether every process has these tensors, by their fp64 sums and sums of squares."""
        exact = [t.detach().double() for t in tensors]
        sums = torch.stack([s for t in exact for s in (t.sum(), t.square().sum())])
        low, high = sums.clone(), sums.clone()
        if self.count > 1:
            dist.all_reduce(low, dist.ReduceOp.MIN, self.group)
            dist.all_reduce(high, dist.ReduceOp.MAX, self.group)
        return torch.equal(low, high)


def _ids(device: torch.device) -> list[int] | None:
    return [device.index] if device.type == "cuda" else None


def _samples(
    trainee: Trainee, images: torch.Tensor, labels: torch.Tensor, group: _Group, seconds: float
) -> list[float]:
    """Milliseconds a step, each over :data:`STEPS_PER_SAMPLE` steps."""
    trainee.restart()  # a rank that took part in smaller groups has averages that others have not
    for _ in range(WARMUP_STEPS if images.is_cuda else 1):
        trainee.step(images, labels)
    if not group.same(list(trainee.model.parameters())):
        raise RuntimeError(
            f"parameters of {group.count} processes differ after the warm-up: gradients were not "
            "summed over them"
        )
    samples: list[float] = []
    began = time.perf_counter()
    go_on = True
    while go_on:
        group.meet()
        start = time.perf_counter()
        for _ in range(STEPS_PER_SAMPLE):
            trainee.step(images, labels)
        group.meet()
        samples.append((time.perf_counter() - start) / STEPS_PER_SAMPLE * 1e3)
        go_on = group.agrees_to_go_on(time.perf_counter() - began < seconds)
    return samples


def _record(
    problem: Problem, variant: str, count: int, samples: list[float], averaging: str
) -> Record:
    timing = summarise(samples, None, False, STEPS_PER_SAMPLE)
    return {
        "case": problem.model, "dtype": problem.dtype, "batch": problem.batch,
        "variant": f"{variant}-{averaging}-{count}gpu", "averaging": averaging,
        "direction": "step", "median_ms": timing.median_ms,
        "p20_ms": timing.p20_ms, "p80_ms": timing.p80_ms, "count": timing.count, "gpus": count,
        "images_per_s": count * problem.batch / timing.median_ms * 1e3,
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
    averaging: Sequence[str] = AVERAGING[:1],
) -> tuple[Document, list[str]]:
    """Measure each number of GPUs, all in one group of processes.

    Args:
        problem: model, dtype and batch per GPU.
        gpus: numbers of GPUs, each at most what the machine has.
        variant: of :data:`~fastswin.bench.train_contenders.VARIANTS`.
        out: root of the results.
        seconds: of samples for each number.
        limit_s: after which the group is stopped; what it has measured counts.
        progress: receives readable lines.
        averaging: ways of :data:`AVERAGING`, one after another.

    Returns:
        The document of this run, and a line for each number that could not be measured.

    Raises:
        ValueError: a number of GPUs that the machine does not have, or unknown ``averaging``.
    """
    if not averaging or not set(averaging) <= set(AVERAGING):
        raise ValueError(f"averaging must be of {', '.join(AVERAGING)}, got {list(averaging)}")
    began = time.monotonic()
    found = torch.cuda.device_count()
    if found and max(gpus) > found:
        raise ValueError(f"gpus must be at most {found}, which this machine has, got {max(gpus)}")
    target, lines = choose_device(None)
    ceilings = measure_device(target, [problem])
    info = make_run_info(
        SUITE, target, ceilings.copy_tbs, ceilings.gemm_tflops[clock_precision(target)]
    )
    progress(f"{problem} {variant}: {max(gpus)} processes")
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch, "records.json")
        command = launch_command(problem, gpus, variant, seconds, answer, averaging)
        left_s = max(1.0, limit_s - (time.monotonic() - began))
        failure = run_group(command, left_s, progress, _Announcer(answer, progress).look)
        records = _read_records(answer)
    done = {(record["gpus"], record["averaging"]) for record in records}
    lines += [
        f"{n} GPUs, {way}: {failure or 'no record'}"
        for n, way in _runs(gpus, averaging)
        if (n, way) not in done
    ]
    records = [stamp(info, record) for record in with_efficiency(records)]
    save_records(result_path(Path(out), info), info, records)
    return make_document(info, records), lines


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


def launch_command(
    problem: Problem,
    gpus: Sequence[int],
    variant: str,
    seconds: float,
    answer: Path,
    averaging: Sequence[str] = AVERAGING[:1],
) -> list[str]:
    """The command line of the group that measures all numbers of ``gpus``."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={max(gpus)}", "-m", "fastswin.bench.train_scaling",
        "--worker", str(answer), "--gpus", ",".join(map(str, gpus)),
        "--model", problem.model, "--dtype", problem.dtype, "--batch", str(problem.batch),
        "--variant", variant, "--seconds", str(seconds), "--averaging", ",".join(averaging),
    ]  # fmt: skip


def _run_worker(options: argparse.Namespace) -> int:
    tell_stacks_on_termination()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        worker(
            Problem(options.model, options.dtype, options.batch), options.variant,
            parse_batches(options.gpus, "gpus"), options.seconds, device,
            lambda records: write_text(options.worker, json.dumps(records)),
            options.averaging.split(","),
        )  # fmt: skip
    finally:
        dist.destroy_process_group()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite from the command line; 0 measured, 1 not all, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m fastswin.bench.train_scaling")
    parser.add_argument("--model", default="swin_tiny_patch4_window7_224")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--batch", type=int, default=128, help="per GPU")
    parser.add_argument("--variant", default="fastswin")
    parser.add_argument("--averaging", default="ddp", help="ddp, graph or ddp,graph")
    parser.add_argument("--gpus", default="1,2,4", help="comma-separated numbers")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--limit-s", type=float, default=300.0, help="for all numbers together")
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
            options.averaging.split(","),
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
        f"{r['case']} {r['dtype']} batch {r['batch']} per GPU, {r['gpus']} GPUs, averaged by "
        f"{r['averaging']}: "
        f"{r['images_per_s']:.0f} img/s, {r['median_ms']:.2f} ms, efficiency "
        + ("-" if r["efficiency"] is None else f"{r['efficiency']:.1%}")
        for r in document["records"]
    ]


if __name__ == "__main__":
    raise SystemExit(main())
