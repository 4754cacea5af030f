"""Launch configurations of every softmax problem, tried on the card: what config.py should pick.

Kernels are compiled first, by several processes on tensors without data, into Triton's cache; then
each configuration is compared with the default (and with itself, bit by bit), timed on real data in
one process, and the best are printed as percent of the copy rate measured in the same run.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Sequence

import torch

from fastswin.bench.failures import describe, release_memory
from fastswin.bench.op_softmax_candidates import configurations
from fastswin.bench.op_softmax_problems import PROBLEMS, SCALE, Inputs, SoftmaxProblem
from fastswin.bench.queued_calls import queued_ms
from fastswin.bench.roofline import measure_ceilings
from fastswin.ops.masked_softmax.config import SoftmaxConfig

#: Swept unless cases are named: the others have the same kernels on fewer rows.
SWEPT = tuple(
    p
    for p in PROBLEMS
    if p.case not in ("masked_1x8x1024x1024", "window_4096x3x49x49", "tril_3x64x1000x1000")
)

#: Part of the deadline after which no further configuration is compiled.
COMPILING_SHARE = 0.5

#: Messages of failed compilations printed at most.
MESSAGES = 10

#: Lines printed per problem and direction, the default always among them.
BEST = 6

Job = tuple[str, str, SoftmaxConfig | None]


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


def _describe(config: SoftmaxConfig | None) -> str:
    if config is None:
        return "default"
    form = f"long kept={config.kept}" if config.long else f"rows={config.block_rows:3d}"
    form = f"paired {form}" if config.paired else form
    form += " ahead" if config.ahead else ""
    rest = f" steps={config.steps}" if config.steps else ""
    if config.programs_per_multiprocessor:
        rest += f" programs={config.programs_per_multiprocessor}"
    return f"{form} keys={config.block_keys:5d} warps={config.num_warps:2d}{rest}"


def sweep(device: torch.device, names: Sequence[str], workers: int, deadline_s: float) -> None:
    """Compile, check, time and print; what does not fit the deadline is named.

    Args:
        device: where to measure.
        names: cases; empty takes the ones with kernels of their own.
        workers: compiling processes.
        deadline_s: seconds; no configuration is timed later, none compiled after half of it.
    """
    start = time.monotonic()
    problems = [p for p in PROBLEMS if p.case in names] if names else list(SWEPT)
    jobs: list[Job] = [
        (p.case, direction, config)
        for p in problems
        for direction in ("forward", "backward")
        for config in configurations(p, direction)
    ]
    answers = _compile_all(jobs, workers, deadline_s * COMPILING_SHARE)
    failed = {job: why for job, why in answers.items() if why}
    for case, direction, config in list(failed)[:MESSAGES]:
        why = failed[case, direction, config]
        print(f"{case} {direction} {_describe(config)}: {why}")
    print(f"{len(failed)} of {len(answers)} configurations do not compile")
    print(f"{len(answers)} of {len(jobs)} compiled in {time.monotonic() - start:.0f} s", flush=True)
    copy_tbs = measure_ceilings(device, ["fp16"]).copy_tbs
    print(f"copy {copy_tbs:.3f} TB/s", flush=True)
    for problem in problems:
        for direction in ("forward", "backward"):
            wanted = [
                c
                for c in configurations(problem, direction)
                if answers.get((problem.case, direction, c)) == ""
            ]
            _sweep_one(problem, direction, wanted, device, copy_tbs, start + deadline_s)
    print(f"swept in {time.monotonic() - start:.0f} s", flush=True)


def _compile_all(jobs: Sequence[Job], workers: int, limit_s: float) -> dict[Job, str]:
    """Why each job does not compile, nothing where it does; jobs past the limit are left out."""
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)
    waiting = {pool.submit(_compile, job): job for job in jobs}
    done, _ = concurrent.futures.wait(waiting, timeout=limit_s)
    pool.shutdown(wait=True, cancel_futures=True)
    return {waiting[future]: future.result() for future in done}


def _sweep_one(
    problem: SoftmaxProblem,
    direction: str,
    configs: Sequence[SoftmaxConfig | None],
    device: torch.device,
    copy_tbs: float,
    deadline: float,
) -> None:
    """Time ``configs``, the default first, until the clock says ``deadline``."""
    if time.monotonic() > deadline:
        print(f"{problem.case} {direction}: skipped, the deadline is over", flush=True)
        return
    inputs = problem.make(device, seed=0)
    if direction == "backward":  # y must be probabilities: zeros where keys are dead
        inputs = dataclasses.replace(inputs, x=problem.fastswin(inputs))
    floor_ms = problem.live_bytes(inputs, direction) / copy_tbs * 1e-9
    want = None
    rows: list[tuple[float, str]] = []
    left = 0
    for config in configs:
        if time.monotonic() > deadline:
            left += 1
            continue
        try:
            call = _launch(problem, inputs, direction, config)
            found = _tensors(call())
            want = want or [t.clone() for t in found]
            wrong = _difference(found, want) or _varies(call, found)
            if wrong:
                print(f"{problem.case} {direction} {_describe(config)}: WRONG, {wrong}", flush=True)
                continue
            rows.append((queued_ms(call), _describe(config)))
        except Exception as error:
            print(f"{problem.case} {direction} {_describe(config)}: {describe(error).message}")
    shown = sorted(rows)[:BEST]
    shown += [row for row in rows if row[1] == "default" and row not in shown]
    print(
        f"{problem.case} {problem.dtype} {direction}, {len(rows)} configurations, {left} not tried"
    )
    for latency_ms, name in shown:
        print(f"  {latency_ms:8.4f} ms  {100 * floor_ms / latency_ms:5.1f} % of copy  {name}")
    print(flush=True, end="")
    del inputs, want
    release_memory()


def _tensors(result: object) -> list[torch.Tensor]:
    """The tensors of one call's result."""
    items = result if isinstance(result, tuple) else (result,)
    return [t for t in items if isinstance(t, torch.Tensor)]


def _difference(found: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> str:
    """How far ``found`` is off, nothing where only the order of additions can be the reason."""
    for ours, theirs in zip(found, want, strict=True):
        if theirs.numel() == 0:
            continue
        largest = theirs.abs().max().item()
        off = (ours - theirs).abs_().max().item()
        if not off <= 4 * torch.finfo(theirs.dtype).eps * largest:
            return f"off by {off:.3g} of {largest:.3g}"
    return ""


def _varies(call: Callable[[], object], found: Sequence[torch.Tensor]) -> str:
    """Whether a second run gives other bits."""
    before = [t.clone() for t in found]
    same = all(torch.equal(a, b) for a, b in zip(_tensors(call()), before, strict=True))
    return "" if same else "two runs differ"
