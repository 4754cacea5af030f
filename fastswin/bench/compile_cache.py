"""Heat torch.compile's on-disk caches for many problems at once.

One Swin costs 35 to 70 s to compile and the compiler uses one core for most of it. Each
(problem, variant) is therefore compiled first in a process of its own, several at a time; the
measuring process then finds FX graphs and Triton binaries on disk and builds its contenders in
seconds, one after another, with nothing else on the card.

    python -m fastswin.bench.compile_cache '{"model": ..., "dtype": ..., "batch": ...}' VARIANT
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from fastswin.bench.contenders import COMPILED, build_contender
from fastswin.bench.failures import UnavailableError
from fastswin.bench.problems import Problem, seeded_images
from fastswin.bench.source import build_source

CompileKey = tuple[Problem, str]

#: Longest that one compilation may take.
TIMEOUT_S = 600.0


def warm_compile_cache(
    problems: Sequence[Problem],
    workers: int,
    *,
    variants: Sequence[str] = COMPILED,
    device: str = "cuda",
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[CompileKey, float]:
    """Compile every problem once in subprocesses.

    Args:
        problems: named variants only; a problem with its own ``config`` is passed over.
        workers: compilations at a time; each gets its share of the cores.
        variants: which compile contenders.
        device: where to compile for.
        timeout_s: limit for the whole warm-up; what is not done by then is compiled when measured.
        progress: receives a line per finished compilation.

    Returns:
        Seconds that each cold build took (beside ``workers - 1`` others). A compilation that failed
        is absent: it fails again, and is reported, when it is measured.

    Raises:
        ValueError: ``workers`` is below 1.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    jobs = [(p, v) for p in problems for v in variants if v in COMPILED and p.config is None]
    # large models take longest: started first, they do not trail behind the rest
    jobs.sort(key=lambda job: -sum(job[0].swin_config.depths) * job[0].swin_config.embed_dim)
    seconds: dict[CompileKey, float] = {}
    deadline = time.monotonic() + timeout_s
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(_compile_apart, job, workers, device, deadline): job for job in jobs}
        for future in as_completed(running):
            problem, variant = running[future]
            outcome = future.result()
            if isinstance(outcome, float):
                seconds[problem, variant] = outcome
                progress(f"compiled {problem} {variant} in {outcome:.1f} s")
            else:
                progress(f"not compiled ahead: {problem} {variant}: {outcome}")
    return seconds


def _compile_apart(job: CompileKey, workers: int, device: str, deadline: float) -> float | str:
    """Run :func:`main` in a subprocess; seconds of the build, or why there are none."""
    problem, variant = job
    left = deadline - time.monotonic()
    if left <= 0:
        return "no time left"
    package_root = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")])),
        # not part of the cache key; the default would start one compiler process per core each
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // workers)),
    }
    command = [sys.executable, "-m", "fastswin.bench.compile_cache"]
    command += [json.dumps(dataclasses.asdict(problem)), variant, device]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=left, check=False
        )
    except subprocess.TimeoutExpired:
        return "no time left"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = lines[-1] if lines else f"exit code {done.returncode}"
    return float(json.loads(last)["build_s"]) if done.returncode == 0 else last


def main(arguments: Sequence[str]) -> int:
    """Build one contender from ``problem-as-JSON variant device``; prints its build time."""
    values, variant, device = arguments
    problem = Problem(**json.loads(values))
    images = seeded_images(problem, problem.batch, torch.device(device), seed=0)
    try:
        contender = build_contender(variant, build_source(problem), problem, images)
    except UnavailableError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({"build_s": contender.build_s}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
