"""Kernels of candidates, compiled side by side into Triton's cache before they are measured.

A job is launched on tensors without data in a process of its own, which notes the kernels and has
Triton compile them; nothing runs. What a candidate lacks is known before it is timed.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

from fastswin.bench.failures import describe
from fastswin.testing.aot import SHARED_MEMORY_LIMIT, record_launches

J = TypeVar("J", bound=Hashable)

#: Shared memory of one program on an H100 or H200.
SHARED_BYTES = SHARED_MEMORY_LIMIT[90] * 1024


class CompilePool(Generic[J]):
    """Processes that compile; jobs run in the order in which they are given.

    Args:
        workers: processes.
        compile_job: a function of a module, which returns None, or why a job cannot be compiled.
    """

    def __init__(self, workers: int, compile_job: Callable[[J], str | None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)
        self._compile_job = compile_job
        self._futures: dict[J, concurrent.futures.Future[str | None]] = {}

    def start(self, job: J) -> None:
        """Queue a job; once is enough."""
        if job not in self._futures:
            self._futures[job] = self._pool.submit(self._compile_job, job)

    def __len__(self) -> int:
        return len(self._futures)

    def error(self, job: J, timeout_s: float) -> str | None:
        """None once compiled, else why not."""
        try:
            return self._futures[job].result(timeout=max(0.0, timeout_s))
        except concurrent.futures.TimeoutError:
            return "not compiled in time"
        except Exception as error:  # a compiler that crashed took its process with it
            return describe(error).message

    def close(self) -> None:
        """Forget jobs that have not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def compile_launches(launch: Callable[[], object], pdl: bool = False) -> str | None:
    """Compile what a call launches, in this process; None, or what went wrong.

    Args:
        launch: calls launchers on meta tensors.
        pdl: its kernels have to wait for the grid before them (programmatic dependent launch).
    """
    torch.set_num_threads(1)
    try:
        with record_launches() as launches:
            launch()
        for one in launches:
            built = one.kernel.warmup(**one.arguments, **one.options, grid=(1,))
            if built.metadata.shared > SHARED_BYTES:
                return f"{built.metadata.shared} bytes of shared memory"
            if pdl and "griddepcontrol.wait" not in built.asm["ptx"]:
                return "the code does not wait for the previous grid"
    except Exception as error:
        return describe(error).message
    return None
