"""A process that holds one model under one variant and takes a turn when it is told to.

    build     the variant's change, the engine, its CUDA graph
    check     max |logits - truth| / max |truth| over the first images, truth: the model in fp64
    turn      5 replays that are not timed, then about 30 ms of replays between two events

Memory: the engine's weights, one graph's buffers and a CUDA context for each process. The copy of
the model in fp64 is gone before the process says that it is ready.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from fastswin.bench.failures import describe
from fastswin.bench.problems import seeded_images
from fastswin.bench.source import build_source
from fastswin.bench.suites import current_device
from fastswin.bench.variants_plan import Job, load_variants

#: What the parent sends for a turn.
TURN = "turn"

#: Replays in front of a turn, queued with it so that the first timed one finds no gap.
WARM_REPLAYS = 5

TURN_US = 30e3
PILOT_REPLAYS = 10

#: Images whose logits are compared with fp64.
CHECKED_IMAGES = 4

Turn = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Ready:
    """What a process says once it can take turns.

    Attributes:
        relative_error: of the logits, in units of the largest in fp64.
        bits: digest of all logits.
        framework: whose model it is.
        build_s: seconds from the variant's change to here.
        copies: why calls of the engine copy images or logits; empty where they do not.
        report: the engine's, or empty.
    """

    relative_error: float
    bits: str
    framework: str
    build_s: float
    copies: str = ""
    report: str = ""


def work(job: Job, log: Path, pipe: multiprocessing.connection.Connection) -> None:
    """Body of the process.

    Args:
        job: what to hold.
        log: receives what is printed.
        pipe: sends a :class:`Ready`, then microseconds for every :data:`TURN`, or at any time a
            :class:`~fastswin.bench.failures.Failure`.
    """
    with log.open("w") as file:
        for descriptor in (1, 2):  # libraries print below Python's streams
            os.dup2(file.fileno(), descriptor)
    exit_code = 0
    try:
        with current_device(torch.device(job.device)):
            ready, turn = prepare(job)
            pipe.send(ready)
            while _asked(pipe):
                pipe.send(turn())
    except BaseException as error:
        sys.stdout.flush()
        traceback.print_exc()  # before the answer, at which the parent reads the log
        pipe.send(describe(error))
        exit_code = 1
    sys.stdout.flush()
    os._exit(exit_code)  # a CUDA context that a kernel has broken may not let Python end


def _asked(pipe: multiprocessing.connection.Connection) -> bool:
    """Whether another turn is wanted; not once the parent has closed its end."""
    try:
        return pipe.recv() == TURN
    except (EOFError, OSError):
        return False


def prepare(job: Job) -> tuple[Ready, Turn]:
    """Change the engine, build it and check it.

    Args:
        job: the problem and its variant.

    Returns:
        What to tell, and what takes a turn and gives microseconds per call.
    """
    torch.set_num_threads(1)  # the other processes of the wave build at the same time
    start = time.monotonic()
    patch = load_variants(job.file).patches[job.variant]
    if patch is not None:
        patch()
    return _build(job, start)


def _build(job: Job, start: float) -> tuple[Ready, Turn]:
    from fastswin.engine import Engine  # the name may be what was changed

    problem, device = job.problem, torch.device(job.device)
    source = build_source(problem)
    images = seeded_images(problem, problem.batch, device, seed=0)
    engine = Engine(
        source.engine_source,
        problem.dtype,  # type: ignore[arg-type]
        device=device,
        graph_batch_sizes=(problem.batch,),
    )
    logits = engine(images)
    error = relative_error(source.model, images, logits)
    raw = logits.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    copies = ""
    if device.type == "cuda":
        ladder = engine._graphs  # what a call replays, without the host's part of the call
        assert ladder is not None
        (captured,) = ladder._graphs.values()
        copies = ", ".join(why for _, why in ladder.copies())
        # the graph reads the images and writes the logits of its last call: both have to live
        turn = _graph_turn(captured.graph.replay, keep=(engine, images, logits))
        torch.cuda.empty_cache()
    else:
        turn = _call_turn(lambda: engine(images))
    report = str(engine.report(problem.batch)) if job.report else ""
    digest = hashlib.sha256(raw).hexdigest()
    build_s = time.monotonic() - start
    return Ready(error, digest, source.framework, build_s, copies, report), turn


def relative_error(model: nn.Module, images: torch.Tensor, logits: torch.Tensor) -> float:
    """Largest error of the first images' logits over the largest of them in fp64.

    Args:
        model: fp32, on the CPU; a copy of it runs on the device of the images.
        images: ``[B, channels, h, w]``.
        logits: ``[B, classes]``.
    """
    exact = copy.deepcopy(model).to(images.device, torch.float64)
    with torch.no_grad():
        truth = exact(images[:CHECKED_IMAGES].double())
        error = (logits[:CHECKED_IMAGES].double() - truth).abs().max() / truth.abs().max()
    return error.item()


def _graph_turn(replay: Callable[[], None], keep: object) -> Turn:
    """Turns of replays; the first finds how many make :data:`TURN_US`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replays = 0
    owners = [keep]

    def run(count: int) -> float:
        assert owners  # of the tensors whose addresses the graph holds
        for _ in range(WARM_REPLAYS):
            replay()
        start.record()
        for _ in range(count):
            replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / count

    def turn() -> float:
        nonlocal replays
        if not replays:
            replays = max(1, math.ceil(TURN_US / run(PILOT_REPLAYS)))
        return run(replays)

    return turn


def _call_turn(call: Callable[[], object]) -> Turn:
    """Turns of one call, behind one that is not timed."""

    def turn() -> float:
        call()
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    return turn
