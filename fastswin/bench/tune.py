"""Tune whole models: every launch that a plan could choose, at every batch, into one table.

    models x batches -> layers and their forms -> launches (deduplicated) -> candidates
    candidates: compiled in the background, checked, timed -> best tiles of each launch
    forms of a layer: the sum of their launches' best times -> what a table could change
    whole models: what it changes to the better (tune_select.py) -> verdicts

The table is saved after every model and batch, so a run can be stopped at any moment and the next
one goes on where it ended. What a table already knows (same shape, rows and Triton) is not measured
again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fastswin.bench.failures import describe
from fastswin.bench.timing import Clock
from fastswin.bench.tune_compile import Compiler
from fastswin.bench.tune_launch import make_bench
from fastswin.bench.tune_rows import known_times, rounded_us, row_of_form, row_of_tiles
from fastswin.bench.tune_search import Found, search
from fastswin.bench.tune_select import Comparison
from fastswin.bench.tune_twins import note_twins
from fastswin.bench.tune_units import Group, Problem, Times, Unit, kernel_of, layer_of
from fastswin.bench.tune_verdicts import write_verdicts
from fastswin.data.atomic import write_text
from fastswin.tuning.card import Card
from fastswin.tuning.document import (
    Row,
    TableRefusedError,
    check_head,
    empty_document,
    format_document,
    merge_rows,
    minor_version,
    read_document,
)
from fastswin.tuning.layers import LayerProblem
from fastswin.tuning.problem import KernelProblem, LaunchConfig
from fastswin.tuning.space import candidates

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
        verdict: of rows before whole models are asked, or if they never are.
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
        verdict: str = "taken",
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.path, self.card, self.device, self.clock = path, card, device, clock
        self.compiler, self.triton, self.deadline = compiler, triton, deadline
        self.verdict, self.progress = verdict, progress
        self.document = empty_document(card)
        if path.exists():
            self.document = read_document(path)
            check_head(self.document, card, path.name)
            if self.document.get("answering_rows_only"):
                raise TableRefusedError(f"{path.name} is what ships; continue the table it is of")
        self._version = minor_version(triton)
        self._latency_us: dict[KernelProblem, float] = {}
        self._default_us: dict[KernelProblem, float] = {}
        self._spaces: dict[KernelProblem, list[LaunchConfig]] = {}
        self._asked: set[Problem] = set()
        self._rejected: list[str] = []
        self._tuned = self._known = self._left = 0

    @property
    def times(self) -> Times:
        """What is known of launches."""
        return Times(self._latency_us, self._default_us)

    def start(self, groups: Sequence[Group]) -> None:
        """Have the candidates of all launches compiled in the background, first groups first."""
        best_us, default_us = known_times(self.document["configs"], self._version)
        self._latency_us |= best_us
        self._default_us |= default_us
        self._known = len(self._latency_us)
        for kernels, layers in groups:
            self._asked |= {*kernels, *layers}
            wanted = [p for p in kernels if p not in self._latency_us]
            self._spaces |= {p: candidates(p, self.card) for p in wanted}
            self.compiler.start([(p, config) for p in wanted for config in self._spaces[p]])

    def run(self, groups: Sequence[Group]) -> TuneResult:
        """Tune groups of launches and layers in order, saving after each; after :meth:`start`."""
        for kernels, layers in groups:
            rows = [row for p in kernels if (row := self._tune(p)) is not None]
            fresh = {kernel_of(row) for row in rows}
            choices = [row for layer in layers if (row := self._choose(layer, fresh)) is not None]
            self.document["configs"] = merge_rows(self.document["configs"], rows)
            self.document["choices"] = merge_rows(self.document["choices"], choices)
            self._save()
        self.compiler.cancel()
        return TuneResult(
            self.document, self._tuned, self._known, self._left, tuple(self._rejected)
        )

    def decide(
        self, verdicts: Mapping[Unit, str], comparisons: Sequence[Comparison], precision: str
    ) -> None:
        """Write what whole models made of units, and their times; rows without a unit gain nothing.

        Args:
            verdicts: of everything that was proposed.
            comparisons: of every model and batch.
            precision: of the models.
        """
        write_verdicts(self.document, self._asked, verdicts, comparisons, precision, self._version)
        self._save()

    def check_twins(self, deadline: float) -> None:
        """Compile and check every answering row in the other half precision; note which pass.

        Args:
            deadline: rows that come after it answer for their own dtype alone.
        """
        note_twins(self.document, self._version, self.device, self.compiler, deadline, self._reject)
        self._save()

    def _tune(self, problem: KernelProblem) -> Row | None:
        """Search one launch; its row, None where there is none to write."""
        if problem in self._latency_us:
            return None
        configs = self._spaces[problem]
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
        """Remember what a search found; the row to write, None where nothing was to choose."""
        self._latency_us[problem] = rounded_us(found.latency_us)
        if found.config is None:
            self._default_us[problem] = self._latency_us[problem]
        elif found.default_us is not None:
            self._default_us[problem] = rounded_us(found.default_us)
        for config, why in found.rejected:
            self._reject(problem, config, why)
        if found.config is None:
            return None
        self._tuned += 1
        before = f" ({found.default_us:.2f} us by heuristic)" if found.default_us else ""
        self.progress(f"{problem}: {found.latency_us:.2f} us of {tried} candidates{before}")
        shared_bytes = built[problem, found.config].shared_bytes
        return row_of_tiles(problem, found.config, found, shared_bytes, self._version, self.verdict)

    def _choose(self, layer: LayerProblem, fresh: set[KernelProblem]) -> Row | None:
        """The row of a layer's fastest form, None unless two are known, or where nothing is new."""
        forms = {
            form: launches
            for form, launches in layer.forms().items()
            if all(p in self._latency_us for p in launches)
        }
        known = any(layer_of(row) == layer for row in self.document["choices"])
        if len(forms) < 2 or (known and fresh.isdisjoint(p for ps in forms.values() for p in ps)):
            return None
        times = {
            form: rounded_us(sum(self._latency_us[p] for p in launches))
            for form, launches in forms.items()
        }
        row = row_of_form(layer, times, self._version, self.verdict)
        self.progress(f"{layer}: {row['choice']} of {times}")
        return row

    def _save(self) -> None:
        write_text(self.path, format_document(self.document))

    def _reject(self, problem: KernelProblem, config: object, why: str) -> None:
        self._rejected.append(f"{problem}: {config}: {why}")
        if len(self._rejected) <= REPORTED:
            self.progress(self._rejected[-1])
