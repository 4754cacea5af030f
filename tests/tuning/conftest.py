"""A small card, a table for it, and a compiler that finds everything already built."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from fastswin.bench.tune_compile import Built, Job
from fastswin.tuning.card import Card

torch.set_num_threads(2)  # the machine that runs these tests is shared


@dataclasses.dataclass
class InstantCompiler:
    """Says that every candidate is built, but those whose configuration ``fails`` names."""

    fails: dict = dataclasses.field(default_factory=dict)
    never: bool = False
    cancelled: bool = False
    started: list[Job] = dataclasses.field(default_factory=list)

    def start(self, jobs: Sequence[Job]) -> None:
        self.started += jobs

    def cancel(self) -> None:
        self.cancelled = True

    def results(self, jobs: Sequence[Job], deadline: float) -> dict[Job, Built]:
        if self.never:
            return {}
        return {job: Built(1024, self.fails.get(job[1])) for job in jobs}


@pytest.fixture
def card() -> Card:
    return Card("Test Card 8GB", 4, (9, 0), 232448)


@pytest.fixture
def compiler() -> InstantCompiler:
    return InstantCompiler()
