"""torch.compile's caches of the attention contenders, filled by several processes at once.

A compiled contender takes 5 to 30 s a direction on one core. Each (problem, variant) is compiled
here by a process of its own, forward without gradients and forward + backward; the measuring
process then finds its graphs and binaries on disk.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence

import torch

from fastswin.bench.failures import describe
from fastswin.bench.op_window_attention_problems import PROBLEMS, AttentionProblem

#: Variants that torch.compile makes.
COMPILED = ("compile", "sdpa-compile", "flex")


def warm(
    device: torch.device,
    names: Sequence[str],
    variants: Sequence[str],
    workers: int,
    backward: bool,
    say: Callable[[str], None],
) -> None:
    """Compile the compiled ones among ``variants`` for the named cases; empty takes all cases.

    Args:
        device: where the contenders will run.
        names: cases.
        variants: of the suite; those that are not compiled are passed over.
        workers: processes at a time.
        backward: whether the backward is compiled as well.
        say: receives one line per contender.
    """
    jobs = [
        (problem, variant, str(device), backward)
        for problem in PROBLEMS if not names or problem.case in names
        for variant in variants if variant in COMPILED
    ]  # fmt: skip
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # inherited; no part of the key
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for line in pool.map(_compile, jobs):
            say(line)


def _compile(job: tuple[AttentionProblem, str, str, bool]) -> str:
    """Build and call one contender; says how long it took, or why it cannot be built."""
    from fastswin.bench.op_window_attention import contenders, make_call

    problem, variant, device, backward = job
    torch.set_num_threads(1)
    began = time.perf_counter()
    try:
        inputs = problem.make(torch.device(device), seed=0)
        function = contenders(problem, [variant])[variant]
        for direction in ("forward", *(["step"] if backward else [])):
            make_call(function, inputs, inputs.leaves(), direction)()
    except Exception as error:
        return f"{problem.case} {variant}: {describe(error).message}"
    return f"{problem.case} {variant}: compiled in {time.perf_counter() - began:.0f} s"
