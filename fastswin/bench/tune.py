"""Tune whole models: every launch that a plan could choose, at every batch, into one table.

    models x batches -> layers and their forms -> launches (deduplicated) -> candidates
    candidates: compiled in the background, checked, timed -> best tiles of each launch
    forms of a layer: the sum of their launches' best times -> the form

The table is saved after every batch size, so a run can be stopped at any moment and the next one
goes on where it ended. What a table already knows (same shape, rows and Triton) is not measured
again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fastswin.bench.failures import describe
from fastswin.bench.timing import Clock
from fastswin.bench.tune_compile import Compiler
from fastswin.bench.tune_launch import make_bench
from fastswin.bench.tune_search import Found, search
from fastswin.data.atomic import write_text
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.tuned import attention_kernel, stage_layers
from fastswin.models.config import SwinConfig
from fastswin.ops.window_attention.api import KERNEL_HEAD_DIMS
from fastswin.tuning.card import Card
from fastswin.tuning.layers import LayerProblem
from fastswin.tuning.problem import (
    CONFIG_TYPES,
    KernelProblem,
    LaunchConfig,
    config_to_dict,
    make_problem,
)
from fastswin.tuning.space import candidates
from fastswin.tuning.table import (
    Row,
    check_head,
    empty_document,
    format_document,
    merge_rows,
    minor_version,
    read_document,
)

#: Rejected candidates that are reported one by one.
REPORTED = 20


@dataclasses.dataclass(frozen=True)
class TuneResult:
    """What a run did.

    Attributes:
        document: the table as it is on disk.
        tuned: launches measured in this run.
        known: launches that the table had already.
        left: launches that the deadline cut off.
        rejected: "launch: configuration: reason" of candidates that are wrong or cannot run.
    """

    document: dict[str, Any]
    tuned: int
    known: int
    left: int
    rejected: tuple[str, ...]


class Tuner:
    """Measures launches and layers of one card into one table.

    Args:
        path: the table; an existing one is continued.
        card, device: where it runs.
        clock: of the device.
        compiler: of candidates.
        triton: version that compiles.
        deadline: no search starts after this (of ``time.monotonic``).
        progress: receives a line per launch.

    Raises:
        TableRefusedError: the file at ``path`` is no table of this card and schema.
    """

    def __init__(
        self,
        path: Path,
        card: Card,
        device: torch.device,
        clock: Clock,
        compiler: Compiler,
        triton: str,
        deadline: float,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.path, self.card, self.device, self.clock = path, card, device, clock
        self.compiler, self.triton, self.deadline = compiler, triton, deadline
        self.progress = progress
        self.document = empty_document(card)
        if path.exists():
            self.document = read_document(path)
            check_head(self.document, card, path.name)
        self._latency_us: dict[KernelProblem, float] = {}
        self._rejected: list[str] = []
        self._tuned = self._known = self._left = 0

    def run(self, groups: Sequence[tuple[list[KernelProblem], list[LayerProblem]]]) -> TuneResult:
        """Tune groups of launches and layers in order, saving after each."""
        self._load_known()
        spaces = {p: candidates(p, self.card) for kernels, _ in groups for p in kernels}
        for kernels, _ in groups:  # first groups are compiled first, while others are measured
            wanted = [p for p in kernels if p not in self._latency_us]
            self.compiler.start([(p, config) for p in wanted for config in spaces[p]])
        for kernels, layers in groups:
            rows = [row for p in kernels if (row := self._tune(p, spaces[p])) is not None]
            choices = [row for layer in layers if (row := self._choose(layer)) is not None]
            self._save(rows, choices)
        return TuneResult(
            self.document, self._tuned, self._known, self._left, tuple(self._rejected)
        )

    def _load_known(self) -> None:
        version = minor_version(self.triton)
        for row in self.document["configs"]:
            if minor_version(row["triton"]) == version and row["op"] in CONFIG_TYPES:
                key = make_problem(row["op"], row["dtype"], row["rows"], **row["shape"])
                self._latency_us[key] = row["latency_us"]
        self._known = len(self._latency_us)

    def _tune(self, problem: KernelProblem, configs: list[LaunchConfig]) -> Row | None:
        """Search one launch; its row, None where there is none to write."""
        if problem in self._latency_us:
            return None
        if time.monotonic() > self.deadline:
            self._left += 1
            return None
        jobs = [(problem, config) for config in configs]
        built = self.compiler.results(jobs, self.deadline)
        if jobs and jobs[0] not in built:  # the deadline came before the heuristic's own choice
            self._left += 1
            return None
        usable: list[LaunchConfig | None] = [] if jobs else [None]
        for job, outcome in built.items():
            if outcome.error is None:
                usable.append(job[1])
            else:
                self._reject(problem, job[1], f"not compiled: {outcome.error}")
        default = configs[0] if configs else None
        try:
            found = search(make_bench(problem, self.device), usable, self.clock, default)
        except Exception as error:  # out of memory at one size must not end the run
            self._reject(problem, None, describe(error).message)
            return None
        return self._take(problem, found, built, len(usable))

    def _take(self, problem: KernelProblem, found: Found, built: dict, tried: int) -> Row | None:
        self._latency_us[problem] = found.latency_us
        for config, why in found.rejected:
            self._reject(problem, config, why)
        if found.config is None:
            return None
        self._tuned += 1
        before = f" ({found.default_us:.2f} us by heuristic)" if found.default_us else ""
        self.progress(f"{problem}: {found.latency_us:.2f} us of {tried} candidates{before}")
        return {
            "op": problem.op,
            "dtype": problem.dtype,
            "triton": minor_version(self.triton),
            "shape": problem.dims,
            "rows": problem.rows,
            "config": config_to_dict(found.config),
            "shared_bytes": built[problem, found.config].shared_bytes,
            "latency_us": round(found.latency_us, 3),
            "default_us": None if found.default_us is None else round(found.default_us, 3),
        }

    def _choose(self, layer: LayerProblem) -> Row | None:
        """The row of a layer's fastest form, None unless two forms are known."""
        times = {
            form: round(sum(self._latency_us[p] for p in launches), 3)
            for form, launches in layer.forms().items()
            if all(p in self._latency_us for p in launches)
        }
        if len(times) < 2:
            return None
        best = min(times, key=lambda form: times[form])
        self.progress(f"{layer}: {best} of {times}")
        return {
            "layer": layer.layer,
            "dtype": layer.dtype,
            "triton": minor_version(self.triton),
            "shape": layer.dims,
            "rows": layer.rows,
            "choice": best,
            "latency_us": times,
        }

    def _save(self, rows: list[Row], choices: list[Row]) -> None:
        self.document["configs"] = merge_rows(self.document["configs"], rows)
        self.document["choices"] = merge_rows(self.document["choices"], choices)
        write_text(self.path, format_document(self.document))

    def _reject(self, problem: KernelProblem, config: object, why: str) -> None:
        self._rejected.append(f"{problem}: {config}: {why}")
        if len(self._rejected) <= REPORTED:
            self.progress(self._rejected[-1])


def tuning_group(
    configs: Sequence[SwinConfig], batch: int, precision: str
) -> tuple[list[KernelProblem], list[LayerProblem]]:
    """Launches and layers of models at one batch size, without repeats.

    Args:
        configs: the models, each at its own image size.
        batch: images.
        precision: "fp16", "bf16", "fp32" or "tf32"; the last two have attention alone to tune.
    """
    kernels: dict[KernelProblem, None] = {}
    layers: dict[LayerProblem, None] = {}
    for config in configs:
        for stage in range(config.num_stages):
            H, W = config.map_size(stage)
            post_norm = config.version == 2
            if PRECISIONS[precision].half:
                found = stage_layers(
                    precision, batch * H * W, config.dim(stage), config.hidden_dim(stage), post_norm
                )
                layers |= dict.fromkeys(found.values())
            if config.head_dim(stage) <= KERNEL_HEAD_DIMS[1]:
                attention = attention_kernel(
                    precision, batch, (H, W), config.stage_window(stage), config.num_heads[stage],
                    config.head_dim(stage), post_norm,
                )  # fmt: skip
                kernels[attention] = None
    for layer in layers:
        for launches in layer.forms().values():
            kernels |= dict.fromkeys(launches)
    return list(kernels), list(layers)
