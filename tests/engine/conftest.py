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
