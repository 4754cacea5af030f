"""Engine tests share the reference models of tests/models."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch
from played_graph import Played

from fastswin.testing.poison import PoisonEmpty

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))  # swin_references

torch.set_num_threads(2)  # the machine that runs these tests is shared


@pytest.fixture(autouse=True)
def poisoned_allocations():
    """An element that no kernel wrote shows as NaN."""
    with PoisonEmpty():
        yield


@pytest.fixture
def played(monkeypatch):
    """A model's graph without a GPU, see played_graph.py."""
    return functools.partial(Played, monkeypatch)


@pytest.fixture
def hopper(monkeypatch) -> torch.device:
    """A GPU of compute capability 9.0 to the planner, which asks it nothing else."""
    monkeypatch.setattr("fastswin.engine.plan.why_not_triton", lambda *_: None)
    monkeypatch.setattr("fastswin.engine.stage_choice.hopper_reason", lambda *_: {})
    monkeypatch.setattr("fastswin.engine.stage_choice.measured_config", lambda *_: None)
    monkeypatch.setattr("fastswin._triton.cluster.interpreting", lambda: False)
    monkeypatch.setattr("fastswin.engine.plan.device_capability", lambda _: (9, 0))
    for module in ("plan", "stage_choice"):
        monkeypatch.setattr(f"fastswin.engine.{module}.multiprocessor_count", lambda _: 132)
    return torch.device("cuda")
