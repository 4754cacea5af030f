"""``python -m fastswin.bench.op_feed_forward``: forms and tiles of the feed-forward layer.

For every stage of Swin-T and Swin-B: the parts that the library's form consists of, then forward
and backward of every form and configuration, then both directions of the best of each form beside
PyTorch eager, with peak memory and what stays alive between the directions. Kernels are compiled
first, by several processes, into Triton's cache. A configuration is checked before it is timed, on
rows that fill no tile: output and all gradients against fp64, and the same bits three times; a red
one has no time. Lines are written to ``<out>/op_feed_forward.txt`` and records to
``<out>/op_feed_forward.json`` as they come.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fastswin.bench.failures import describe, release_memory
from fastswin.bench.memory import held_mib, peak_mib
from fastswin.bench.op_feed_forward_problems import (
    PROBLEMS,
    FeedForwardProblem,
    Operands,
    Tensors,
    backward_candidates,
    forward_candidates,
    pairs,
)
from fastswin.ops.feed_forward.config import EpilogueConfig, FeedForwardConfig, FusedConfig
from fastswin.testing.tolerance import compare_to_oracle

CALLS, ROUNDS = 10, 3

#: About 4 ms in which the host queues the calls of one round.
HEAD_START_CYCLES = 8_000_000

#: Rows of the correctness check: 24 tiles of 128 and 43 rows more.
CHECK_ROWS = 24 * 128 + 43

NAMES = ("y", "dx", "dfc1", "dbias", "dfc2")
EVERYTHING = [True] * 4

Call = Callable[[], object]
Config = FusedConfig | EpilogueConfig
Job = tuple[FeedForwardProblem, FeedForwardConfig, torch.dtype]


def forward(o: Operands, config: FeedForwardConfig) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(y, pre)``; a fused form keeps no pre."""
    from fastswin.ops.feed_forward.forward import feed_forward_fwd
    from fastswin.ops.feed_forward.register import KEEP_NOTHING, KEEP_PRE

    keep = KEEP_NOTHING if config.fused else KEEP_PRE
    y, pre, _ = feed_forward_fwd(o.x, o.fc1, o.bias, o.fc2, keep, config)
    return y, None if config.fused else pre


def backward(o: Operands, pre: torch.Tensor | None, config: FeedForwardConfig) -> Tensors:
    """``(dx, dfc1, dbias, dfc2)``, weight gradients in fp32."""
    from fastswin.ops.feed_forward.backward import feed_forward_bwd

    return feed_forward_bwd(
        o.dy, o.x, pre, None, o.fc1, o.bias, o.fc2, EVERYTHING, torch.float32, config
    )


def both(o: Operands, config: FeedForwardConfig) -> Tensors:
    y, pre = forward(o, config)
    return y, *backward(o, pre, config)


def compile_job(job: Job) -> str:
    """Compile one configuration's kernels into the cache; why it cannot be, or nothing."""
    from fastswin.testing.aot import record_launches

    problem, config, dtype = job
    try:
        torch.set_num_threads(1)
        with record_launches() as launches:
            both(problem.shapes(dtype), config)
        for launch in launches:
            launch.kernel.warmup(grid=(1,), **launch.arguments, **launch.options)
    except Exception as error:
        return describe(error).message
    return ""


def median_ms(call: Call, device: torch.device) -> float:
    """Median over rounds of back-to-back calls, queued behind a wait so that no launch is seen."""
    call()
    times = []
    for _ in range(ROUNDS):
        if device.type != "cuda":
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e3)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return sorted(times)[ROUNDS // 2]


@dataclasses.dataclass
class Log:
    """Lines and records, on disk at once.

    Attributes:
        folder: where the two files go.
        records: one for each timed or red configuration.
    """

    folder: Path
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def say(self, line: str) -> None:
        print(line, flush=True)
        with (self.folder / "op_feed_forward.txt").open("a") as file:
            file.write(line + "\n")

    def record(self, **fields: Any) -> None:
        self.records.append(fields)
        text = json.dumps(self.records, indent=1, default=str)
        (self.folder / "op_feed_forward.json").write_text(text)


@dataclasses.dataclass(frozen=True)
class Judge:
    """Gates of one problem, eager and fp64 evaluated once."""

    operands: Operands
    eager: Tensors
    oracle: Tensors

    @classmethod
    def of(cls, problem: FeedForwardProblem, device: torch.device, dtype: torch.dtype) -> Judge:
        o = problem.make(device, dtype, rows=min(CHECK_ROWS, problem.rows - 1), seed=1)
        return cls(o, o.eager(), o.eager(torch.float64))

    def verdict(self, config: FeedForwardConfig) -> str:
        """What is wrong with a configuration, or nothing."""
        made = both(self.operands, config)
        for name, a, e, truth in zip(NAMES, made, self.eager, self.oracle, strict=True):
            dtype = self.operands.x.dtype
            gate = compare_to_oracle(a.to(dtype), e, truth, dtype)
            if not gate.passed or not bool(torch.isfinite(a).all()):
                return (
                    f"{name}: max error {gate.max_error:.3g} of {gate.max_bound:.3g}, "
                    f"rms {gate.rms_error:.3g} of {gate.rms_bound:.3g}"
                )
        for _ in range(2):
            again = both(self.operands, config)
            if not all(torch.equal(a, b) for a, b in zip(made, again, strict=True)):
                return "not the same bits twice"
        return ""


def time_parts(o: Operands, device: torch.device, case: str, log: Log) -> None:
    """What the library's form consists of, and the two ways to fp32 weight gradients."""
    from fastswin.ops.feed_forward.backward import gelu_bwd, weight_gradient

    bias = o.bias.to(o.x.dtype)
    pre = F.linear(o.x, o.fc1, bias)
    act, dpre = F.gelu(pre), o.dy @ o.fc2
    parts: dict[str, Call] = {
        "fc1": lambda: F.linear(o.x, o.fc1, bias),
        "gelu": lambda: F.gelu(pre),
        "fc2": lambda: F.linear(act, o.fc2),
        "dy fc2": lambda: o.dy @ o.fc2,
        "gelu backward": lambda: gelu_bwd(dpre, pre, need_h=True, need_bias=True),
        "dpre fc1": lambda: dpre @ o.fc1,
        "dfc1 cast": lambda: weight_gradient(dpre, o.x, torch.float32, direct=False),
        "dfc1 fp32": lambda: weight_gradient(dpre, o.x, torch.float32, direct=True),
        "dfc2 cast": lambda: weight_gradient(o.dy, act, torch.float32, direct=False),
        "dfc2 fp32": lambda: weight_gradient(o.dy, act, torch.float32, direct=True),
    }
    told = []
    for name, call in parts.items():
        try:
            latency_ms = median_ms(call, device)
        except Exception as error:
            told.append(f"{name}: {describe(error).message}")
            continue
        log.record(case=case, part=name, median_ms=latency_ms)
        told.append(f"{name} {latency_ms:.4f}")
    log.say("  parts, ms: " + ", ".join(told))


def partner(config: Config | None, direction: str, problem: FeedForwardProblem) -> Any:
    """A whole configuration of one direction's: fused needs a fused other half, others none."""
    other: Config | None = None
    if isinstance(config, FusedConfig):
        candidates = forward_candidates if direction == "backward" else backward_candidates
        other = next(c for c in candidates(problem) if isinstance(c, FusedConfig))
    halves = (config, other) if direction == "forward" else (other, config)
    return FeedForwardConfig(*halves)


def _one_direction(
    direction: str, o: Operands, pre: torch.Tensor | None, config: FeedForwardConfig
) -> Call:
    if direction == "forward":
        return lambda: forward(o, config)
    return lambda: backward(o, None if config.fused else pre, config)


def time_direction(
    problem: FeedForwardProblem,
    direction: str,
    candidates: Sequence[Config | None],
    o: Operands,
    judge: Judge,
    device: torch.device,
    log: Log,
) -> dict[type, tuple[float, Config | None]]:
    """The fastest right configuration of every form."""
    _, pre = forward(o, FeedForwardConfig())
    best: dict[type, tuple[float, Config | None]] = {}
    for config in candidates:
        whole = partner(config, direction, problem)
        try:
            wrong = judge.verdict(whole)
            if wrong:
                log.say(f"  {direction:8} RED {wrong}: {config}")
                log.record(case=problem.case, direction=direction, config=config, red=wrong)
                continue
            call = _one_direction(direction, o, pre, whole)
            latency_ms = median_ms(call, device)
        except Exception as error:
            log.say(f"  {direction:8} {describe(error).message}: {config}")
            release_memory()
            continue
        log.say(f"  {direction:8} {latency_ms:8.4f} ms  {config or 'library'}")
        log.record(case=problem.case, direction=direction, config=config, median_ms=latency_ms)
        form = type(config)
        if form not in best or latency_ms < best[form][0]:
            best[form] = latency_ms, config
    return best


def time_both(
    name: str, call: Call, kept: Callable[[], Any], device: torch.device, case: str, log: Log
) -> None:
    """Both directions of one contender, with its memory."""
    fields: dict[str, Any] = {"median_ms": median_ms(call, device)}
    if device.type == "cuda":
        held = held_mib()
        fields["peak_mib"] = peak_mib(call, held)
        alive = kept()
        fields["kept_mib"] = held_mib() - held
        del alive
    log.record(case=case, direction="both", contender=name, **fields)
    log.say(f"  both     {name}: " + ", ".join(f"{k} {v:.4f}" for k, v in fields.items()))


def measure_problem(
    problem: FeedForwardProblem, device: torch.device, dtype: torch.dtype, log: Log
) -> None:
    log.say(f"{problem.case}, M {problem.rows}, {dtype}, {torch.__version__}")
    judge = Judge.of(problem, device, dtype)
    o = problem.make(device, dtype)
    time_parts(o, device, problem.case, log)
    best = {
        direction: time_direction(
            problem, direction, [None, *candidates(problem)], o, judge, device, log
        )
        for direction, candidates in (
            ("forward", forward_candidates), ("backward", backward_candidates),
        )
    }  # fmt: skip
    chosen = {"library": FeedForwardConfig()}
    for form in (FusedConfig, EpilogueConfig):
        if all(form in best[direction] for direction in best):
            halves = (best["forward"][form][1], best["backward"][form][1])
            chosen[form.__name__.removesuffix("Config").lower()] = FeedForwardConfig(*halves)
    for name, config in chosen.items():
        step = functools.partial(both, o, config)
        start = functools.partial(forward, o, config)
        time_both(name, step, start, device, problem.case, log)
        log.say(f"           {config}")
    leaves = [t.to(dtype).requires_grad_() for t in (o.x, o.fc1, o.bias, o.fc2)]

    def eager_forward() -> torch.Tensor:
        return F.linear(F.gelu(F.linear(*leaves[:3])), leaves[3])

    time_both(
        "eager", lambda: torch.autograd.grad(eager_forward(), leaves, o.dy), eager_forward, device,
        problem.case, log,
    )  # fmt: skip


def run(
    problems: Sequence[FeedForwardProblem],
    device: torch.device,
    dtype: torch.dtype,
    folder: Path,
    workers: int,
    deadline_s: float,
) -> int:
    """Compile, check, time; returns 0, or 1 where a problem did not fit the deadline."""
    start = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    log = Log(folder)
    if device.type == "cuda":
        jobs = list(dict.fromkeys(
            (_representative(p, c), c, dtype)
            for p in problems for c in pairs(forward_candidates(p), backward_candidates(p))
        ))  # fmt: skip
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
            answers = list(pool.map(compile_job, jobs))
        for (problem, config, _), why in zip(jobs, answers, strict=True):
            if why:
                log.say(f"{problem.case} {config}: {why}")
        log.say(f"{len(jobs)} pairs compiled in {time.monotonic() - start:.0f} s")
    skipped = 0
    for problem in problems:
        if time.monotonic() - start > deadline_s:
            log.say(f"{problem.case}: skipped, the deadline of {deadline_s:.0f} s is over")
            skipped = 1
            continue
        measure_problem(problem, device, dtype, log)
        release_memory()
    log.say(f"{time.monotonic() - start:.0f} s in all")
    return skipped


def _representative(problem: FeedForwardProblem, config: FeedForwardConfig) -> FeedForwardProblem:
    """A problem with the same binaries: products with an epilogue have one for all widths."""
    return problem if config.fused else PROBLEMS[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 all measured, 1 something skipped, 2 an unknown case."""
    parser = argparse.ArgumentParser(prog="fastswin.bench.op_feed_forward")
    parser.add_argument("--out", type=Path, required=True, help="folder of the log")
    parser.add_argument("--deadline-s", type=float, default=100.0)
    parser.add_argument("--cases", default="", help="substrings, comma-separated; all by default")
    parser.add_argument("--workers", type=int, default=15, help="compiling processes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    wanted = [name for name in options.cases.split(",") if name]
    problems = [p for p in PROBLEMS if not wanted or any(name in p.case for name in wanted)]
    if not problems:
        known = ", ".join(p.case for p in PROBLEMS)
        print(f"no case holds any of {wanted}; known: {known}", file=sys.stderr)
        return 2
    device = torch.device(options.device)
    return run(problems, device, torch.bfloat16, options.out, options.workers, options.deadline_s)


if __name__ == "__main__":
    raise SystemExit(main())
