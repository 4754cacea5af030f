"""Rows that answer in one half precision, compiled and checked in the other.

    tiles of a launch   ``also`` names the twin dtype where its kernel compiles and is right
    form of a layer     ``also`` names it unless a launch of that form failed

fp16 and bf16 move the same bytes through the same instructions at the same rate, so what is fastest
in one is fastest in the other; whether it is right there has to be seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastswin.bench.failures import describe
from fastswin.bench.tune_compile import Compiler, Job
from fastswin.bench.tune_launch import make_bench
from fastswin.bench.tune_search import make_check
from fastswin.bench.tune_units import Unit, kernel_of, layer_of
from fastswin.tuning.problem import KernelProblem, LaunchConfig, config_from_dict

#: The other half precision.
TWINS = {"fp16": "bf16", "bf16": "fp16"}

#: Told of a launch, its configuration and what is wrong with it.
Reject = Callable[[KernelProblem, LaunchConfig, str], None]


def note_twins(
    document: dict[str, Any],
    version: str,
    device: torch.device,
    compiler: Compiler,
    deadline: float,
    reject: Reject,
) -> None:
    """Write into answering rows which twin dtype they answer for as well.

    Args:
        document: the table, changed in place.
        version: of the Triton that compiles; rows of others stay as they are.
        device: where the kernels are checked.
        compiler: of the kernels.
        deadline: rows that come after it answer for their own dtype alone.
        reject: told of every twin that is wrong or cannot run.
    """
    answering, forms = (
        [r for r in document[rows] if r["verdict"] == "gain" and r["triton"] == version]
        for rows in ("configs", "choices")
    )
    jobs: dict[KernelProblem, Job] = {}
    for row in answering:
        if row["dtype"] in TWINS:
            twin = dataclasses.replace(kernel_of(row), dtype=TWINS[row["dtype"]])
            jobs[kernel_of(row)] = twin, config_from_dict(row["op"], row["config"])
    passed = _right(jobs, device, compiler, deadline, reject)
    for row in answering:
        row["also"] = [TWINS[row["dtype"]]] if kernel_of(row) in passed else []
    failed = jobs.keys() - passed
    for row in forms:
        if row["dtype"] in TWINS:
            kernels = set(Unit(layer_of(row), row["choice"]).kernels())
            row["also"] = [] if kernels & failed else [TWINS[row["dtype"]]]


def _right(
    jobs: Mapping[KernelProblem, Job],
    device: torch.device,
    compiler: Compiler,
    deadline: float,
    reject: Reject,
) -> set[KernelProblem]:
    """Launches whose twins compile in time and are right."""
    compiler.start(list(jobs.values()))
    passed: set[KernelProblem] = set()
    for own, job in jobs.items():
        built = compiler.results([job], deadline).get(job)
        if built is None:
            continue
        why = built.error
        try:
            why = why or make_check(make_bench(job[0], device))(job[1])
        except Exception as error:
            why = describe(error).message
        if why is None:
            passed.add(own)
        else:
            reject(*job, why)
    return passed
