"""Launch configurations of every softmax problem, tried on the card: what config.py should pick.

Kernels are compiled first, by several processes on tensors without data, into Triton's cache; then
each configuration is timed on real data, in one process, and the best are printed as percent of
the copy rate measured in the same run.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from fastswin.bench.failures import describe, release_memory
from fastswin.bench.op_softmax_problems import PROBLEMS, SCALE, Inputs, SoftmaxProblem
from fastswin.bench.roofline import measure_ceilings
from fastswin.ops.masked_softmax.config import (
    MAX_PAIRED_ROW,
    SoftmaxConfig,
    next_power_of_2,
)

#: Rounds of timed calls per configuration; the median round counts.
ROUNDS = 3
CALLS = 10

#: About 2 ms in which the host queues the calls of one round.
HEAD_START_CYCLES = 4_000_000

#: Swept unless cases are named: the others have the same kernels on fewer rows.
SWEPT = tuple(
    p
    for p in PROBLEMS
    if p.case not in ("masked_1x8x1024x1024", "window_4096x3x49x49", "tril_3x64x1000x1000")
)

#: Messages of failed compilations printed at most.
MESSAGES = 10

#: Lines printed per problem and direction, the default always among them.
BEST = 6

Job = tuple[str, str, SoftmaxConfig | None]


def configurations(problem: SoftmaxProblem, direction: str) -> list[SoftmaxConfig | None]:
    """Candidates of one problem; None, the default, first."""
    keys, itemsize = problem.shape[-1], problem.torch_dtype.itemsize
    vector = 16 // itemsize
    while keys % vector:
        vector //= 2
    found = list(_whole_rows(problem, keys, vector, direction))
    if problem.kind == "window" and keys % 2 and keys <= MAX_PAIRED_ROW and itemsize == 2:
        found = list(_paired_rows(keys))
    if keys >= 16384:
        found += list(_long_rows(keys, vector, direction))
    return [None, *dict.fromkeys(found)]


def _whole_rows(
    problem: SoftmaxProblem, keys: int, vector: int, direction: str
) -> Iterator[SoftmaxConfig]:
    looped = problem.kind in ("masked", "window") and direction == "forward"
    looped = looped or (problem.kind == "window" and direction == "backward")
    least = 24 if keys < 64 else 12
    limit = 80 if direction == "forward" and not looped else 64
    for warps in (1, 2, 4, 8, 16):
        for lanes in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
            block = lanes * vector
            if block > 2 * next_power_of_2(keys) or lanes > WARP_LANES * warps * 2:
                continue
            chunks = -(-keys // block)
            if chunks > (4 if problem.kind == "tril" else 16):
                continue
            for rows in (1, 2, 4, 8, 16, 32, 64, 128):
                threads = WARP_LANES * warps
                held = rows * chunks * block / threads
                if rows * block < threads * vector or not least <= held <= limit:
                    continue
                if chunks * block > 1.35 * keys:
                    continue
                yield SoftmaxConfig(rows, block, warps)
                if looped and held >= 24:
                    yield SoftmaxConfig(rows, block, warps, steps=8)


def _paired_rows(keys: int) -> Iterator[SoftmaxConfig]:
    for lanes in (4, 8, 16):
        for warps in (1, 2, 4):
            for pairs in (1, 2, 4):  # per thread
                if pairs * -(-keys // lanes) <= 32:
                    rows = 2 * pairs * warps * WARP_LANES // lanes
                    for steps in (0, 8, 24, 48):
                        yield SoftmaxConfig(rows, lanes, warps, steps=steps, paired=True)


def _long_rows(keys: int, vector: int, direction: str) -> Iterator[SoftmaxConfig]:
    for warps in (8, 16, 32):
        for vectors in (1, 2, 4):
            block = WARP_LANES * warps * vector * vectors
            if block * 2 > keys:
                continue
            for kept in (0, 2, 4, 6):
                tensors = 1 if direction == "forward" else 2
                if kept * vectors * vector * tensors <= 2048 // warps:
                    yield SoftmaxConfig(1, block, warps, long=True, kept=kept)


WARP_LANES = 32


def _launch(
    problem: SoftmaxProblem, inputs: Inputs, direction: str, config: SoftmaxConfig | None
) -> Callable[[], object]:
    """One launch as the operator makes it, ``config`` aside."""
    from fastswin.ops.masked_softmax.backward import masked_softmax_bwd
    from fastswin.ops.masked_softmax.forward import masked_softmax_fwd

    x, grad, bias, mask = inputs.x, inputs.grad, inputs.bias, inputs.mask
    causal = problem.kind == "tril"
    scale = SCALE if problem.kind == "masked" else 1.0
    if problem.kind == "window" and mask is not None:
        shape = (-1, problem.windows, *x.shape[1:])
        x, grad, mask = x.view(shape), grad.view(shape), mask[:, None]
    if direction == "forward":
        out = torch.empty_like(x)
        return lambda: masked_softmax_fwd(
            x, bias, mask, inputs.lens, scale, causal, out=out, config=config
        )
    needs = (True, bias is not None, False)
    return lambda: masked_softmax_bwd(
        grad, x, bias, None, inputs.lens, scale, causal, needs, config=config
    )


def _compile(job: Job) -> str:
    """Compile one configuration into the cache; returns why it cannot be, or nothing."""
    from fastswin.ops.masked_softmax import backward, forward
    from fastswin.ops.masked_softmax.launch import backward_problem, forward_problem

    case, direction, config = job
    problem = next(p for p in PROBLEMS if p.case == case)
    try:
        x = torch.empty(problem.shape, dtype=problem.torch_dtype, device="meta")
        bias = mask = lens = None
        if problem.kind == "window":
            bias = torch.empty(problem.shape[1:], dtype=x.dtype, device="meta")
            mask = torch.empty(problem.windows, 1, *problem.shape[2:], dtype=x.dtype, device="meta")
            x = x.view(-1, problem.windows, *problem.shape[1:])
        elif problem.kind == "masked":
            shape = (problem.shape[0], 1, *problem.shape[2:])
            mask = torch.empty(shape, dtype=torch.bool, device="meta")
        elif problem.kind == "tril":
            lens = torch.empty(problem.shape[:1], dtype=torch.int64, device="meta")
        causal = lens is not None
        scale = SCALE if problem.kind == "masked" else 1.0
        out = torch.empty_like(x)
        if direction == "forward":
            launch = forward_problem(x, out, bias, mask, lens, scale, causal, config)
            kernels = forward.FORWARD_KERNELS
        else:
            summed = {} if bias is None else {"bias": bias}
            launch = backward_problem(x, x, out, summed, lens, scale, causal, config)
            kernels = backward.BACKWARD_KERNELS
        kernel = kernels[launch.form]
        kernel.warmup(*launch.arguments, grid=(1,), num_warps=launch.num_warps, **launch.constants)
    except Exception as error:
        return describe(error).message
    return ""


def _median_ms(call: Callable[[], object]) -> float:
    """Median over rounds of back-to-back calls, queued behind a wait so that no launch is seen."""
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return sorted(times)[ROUNDS // 2]


def _describe(config: SoftmaxConfig | None) -> str:
    if config is None:
        return "default"
    form = f"long kept={config.kept}" if config.long else f"rows={config.block_rows:3d}"
    form = f"paired {form}" if config.paired else form
    steps = f" steps={config.steps}" if config.steps else ""
    return f"{form} keys={config.block_keys:5d} warps={config.num_warps:2d}{steps}"


def sweep(device: torch.device, names: Sequence[str], workers: int, deadline_s: float) -> None:
    """Compile, time and print; problems that do not fit the deadline are named."""
    start = time.monotonic()
    problems = [p for p in PROBLEMS if p.case in names] if names else list(SWEPT)
    jobs: list[Job] = [
        (p.case, direction, config)
        for p in problems
        for direction in ("forward", "backward")
        for config in configurations(p, direction)
    ]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        answers = list(pool.map(_compile, jobs, chunksize=4))
    failed = [(job, why) for job, why in zip(jobs, answers, strict=True) if why]
    for (case, direction, config), why in failed[:MESSAGES]:
        print(f"{case} {direction} {_describe(config)}: {why}")
    print(f"{len(failed)} of {len(jobs)} configurations do not compile", flush=True)
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)
    copy_tbs = measure_ceilings(device, ["fp16"]).copy_tbs
    print(f"copy {copy_tbs:.3f} TB/s", flush=True)
    for problem in problems:
        for direction in ("forward", "backward"):
            if time.monotonic() - start > deadline_s:
                print(f"{problem.case} {direction}: skipped, the deadline is over")
                continue
            _sweep_one(problem, direction, device, copy_tbs)


def _sweep_one(
    problem: SoftmaxProblem, direction: str, device: torch.device, copy_tbs: float
) -> None:
    inputs = problem.make(device, seed=0)
    if direction == "backward":  # y must be probabilities: zeros where keys are dead
        inputs = dataclasses.replace(inputs, x=problem.fastswin(inputs))
    floor_ms = problem.live_bytes(inputs, direction) / copy_tbs * 1e-9
    rows: list[tuple[float, str]] = []
    for config in configurations(problem, direction):
        try:
            call = _launch(problem, inputs, direction, config)
            rows.append((_median_ms(call), _describe(config)))
        except Exception as error:
            print(f"{problem.case} {direction} {_describe(config)}: {describe(error).message}")
    shown = sorted(rows)[:BEST]
    shown += [row for row in rows if row[1] == "default" and row not in shown]
    print(f"{problem.case} {problem.dtype} {direction}, {len(rows)} configurations")
    for latency_ms, name in shown:
        print(f"  {latency_ms:8.4f} ms  {100 * floor_ms / latency_ms:5.1f} % of copy  {name}")
    print(flush=True, end="")
    del inputs
    release_memory()
