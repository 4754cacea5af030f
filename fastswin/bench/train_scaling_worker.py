"""``python -m fastswin.bench.train_scaling_worker``: one process of suite ``scaling``.

``torch.distributed.run`` starts as many as the plan's largest number asks for. Each builds (and
captures) the model once and takes part in the numbers that it belongs to, one after another.
Between samples the processes meet, so that a sample is the time of the slowest; before any, their
parameters must be equal after steps on different images, or gradients were not summed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fastswin.bench.problems import seeded_images
from fastswin.bench.process_group import tell_stacks_on_termination
from fastswin.bench.record import Record
from fastswin.bench.source import build_source
from fastswin.bench.timing import summarise
from fastswin.bench.train_contenders import Trainee, build_trainee
from fastswin.bench.train_scaling_group import FirstProcesses, device_ids
from fastswin.bench.train_scaling_plan import ScalingPlan, add_options, read_plan
from fastswin.data.atomic import write_text

WARMUP_STEPS, STEPS_PER_SAMPLE = 10, 5


def work(
    plan: ScalingPlan,
    device: torch.device,
    report: Callable[[list[Record]], None] = lambda records: None,
) -> list[Record]:
    """Train in this process of a group that is initialised.

    Args:
        plan: numbers of processes to train on, each at most the group's size.
        device: this process's.
        report: receives what is known after each number, on rank 0.

    Returns:
        A record for each number and way of averaging, on rank 0; empty elsewhere.

    Raises:
        RuntimeError: the processes' parameters differ after the warm-up.
    """
    rank, problem = dist.get_rank(), plan.problem
    images = seeded_images(problem, problem.batch, device, seed=rank).float()
    labels = torch.arange(problem.batch, device=device) % problem.swin_config.num_classes
    # captured before the first collective, whose watchdog asks the GPU from another thread
    source = build_source(problem)
    trainee = build_trainee(plan.variant, source, problem.dtype, device, images)
    own = trainee.forward if isinstance(trainee.forward, nn.Module) else trainee.model
    records: list[Record] = []
    groups = {count: FirstProcesses(count, device) for count in sorted(set(plan.gpus))}
    for count, way in plan.runs:
        group, training = groups[count], trainee
        if rank < count:
            if way == "graph":
                training = build_trainee(
                    plan.variant, source, problem.dtype, device, images, group.group
                )
            elif way == "ddp":
                trainee.forward = group.parallel(own)
            samples_ms = time_steps(training, images, labels, group, plan.seconds)
            if rank == 0:
                records.append(_record(plan, count, way, samples_ms))
                report(records)
            trainee.forward = own
            gc.collect()  # DDP's hooks on the parameters go with it
        dist.barrier(device_ids=device_ids(device))
    return records


def time_steps(
    trainee: Trainee,
    images: torch.Tensor,
    labels: torch.Tensor,
    group: FirstProcesses,
    seconds: float,
) -> list[float]:
    """Milliseconds a step, each over :data:`STEPS_PER_SAMPLE` steps.

    Args:
        trainee: of this process.
        images, labels: ``[B, channels, h, w]`` and ``[B]``, its own.
        group: the processes that train together.
        seconds: of samples.

    Raises:
        RuntimeError: the processes' parameters differ after the warm-up.
    """
    trainee.restart()  # a rank that took part in smaller groups has averages that others have not
    for _ in range(WARMUP_STEPS if images.is_cuda else 1):
        trainee.step(images, labels)
    if not group.same(list(trainee.model.parameters())):
        raise RuntimeError(
            f"parameters of {group.count} processes differ after the warm-up: gradients were not "
            "summed over them"
        )
    samples_ms: list[float] = []
    began = time.perf_counter()
    go_on = True
    while go_on:
        group.meet()
        start = time.perf_counter()
        for _ in range(STEPS_PER_SAMPLE):
            trainee.step(images, labels)
        group.meet()
        samples_ms.append((time.perf_counter() - start) / STEPS_PER_SAMPLE * 1e3)
        go_on = group.agrees_to_go_on(time.perf_counter() - began < seconds)
    return samples_ms


def _record(plan: ScalingPlan, count: int, averaging: str, samples_ms: list[float]) -> Record:
    timing, problem = summarise(samples_ms, None, False, STEPS_PER_SAMPLE), plan.problem
    return {
        "case": problem.model, "dtype": problem.dtype, "batch": problem.batch,
        "variant": f"{plan.variant}-{averaging}-{count}gpu", "averaging": averaging,
        "direction": "step", "median_ms": timing.median_ms,
        "p20_ms": timing.p20_ms, "p80_ms": timing.p80_ms, "count": timing.count, "gpus": count,
        "images_per_s": count * problem.batch / timing.median_ms * 1e3,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Join the group of ``torch.distributed.run``; rank 0 writes the records."""
    parser = argparse.ArgumentParser(prog="python -m fastswin.bench.train_scaling_worker")
    add_options(parser)
    parser.add_argument("--answer", type=Path, required=True, help="JSON file of the records")
    options = parser.parse_args(arguments)
    tell_stacks_on_termination()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        work(
            read_plan(options), device,
            lambda records: write_text(options.answer, json.dumps(records)),
        )  # fmt: skip
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
