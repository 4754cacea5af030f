"""Caches of Triton and torch.compile for the MLP suite, filled by several processes at once.

Each (problem, variant) that compiles anything is built and called once by a process of its own;
the measuring process then finds its binaries on disk.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence

import torch

from fastswin.bench.failures import describe
from fastswin.bench.op_mlp_contenders import Operands, contenders
from fastswin.bench.op_mlp_problems import PROBLEMS, MlpProblem

#: Variants that compile something.
COMPILED = ("fastswin", "parts", "compile")

Job = tuple[MlpProblem, str, str]


def warm(
    device: torch.device,
    names: Sequence[str],
    variants: Sequence[str],
    workers: int,
    say: Callable[[str], None],
) -> None:
    """Compile what the named cases need; empty takes all cases.

    Args:
        device: where the contenders will run.
        names: cases.
        variants: of the suite; those that compile nothing are passed over.
        workers: processes at a time.
        say: receives one line per contender.
    """
    jobs = [
        (problem, variant, str(device))
        for problem in PROBLEMS if not names or problem.case in names
        for variant in variants if variant in COMPILED
    ]  # fmt: skip
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # inherited; no part of the key
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for line in pool.map(compile_job, jobs):
            say(line)


def compile_job(job: Job) -> str:
    """Build and call one contender; says how long it took, or why it cannot be built."""
    problem, variant, device = job
    torch.set_num_threads(1)
    began = time.perf_counter()
    try:
        operands = Operands.make(problem, torch.device(device), 0)
        function = contenders(problem, [variant], torch.device(device))[variant]
        with torch.no_grad():
            function(operands)
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        return f"{problem.case} {variant}: {describe(error).message}"
    return f"{problem.case} {variant}: compiled in {time.perf_counter() - began:.0f} s"
