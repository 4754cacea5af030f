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
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from fastswin.bench.failures import release_memory
from fastswin.bench.op_feed_forward_check import compile_job
from fastswin.bench.op_feed_forward_problems import (
    PROBLEMS,
    FeedForwardProblem,
    backward_candidates,
    forward_candidates,
    pairs,
)
from fastswin.bench.op_feed_forward_timing import Log, ProblemTimer
from fastswin.ops.feed_forward.config import FeedForwardConfig


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
        log.say(f"{problem.case}, M {problem.rows}, {dtype}, {torch.__version__}")
        ProblemTimer(problem, device, dtype, log).time_all()
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
