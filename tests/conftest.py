"""One rule for every test: kernels run natively on a GPU, else in Triton's interpreter.

Tests marked ``gpu`` are deselected (not skipped) on a machine without one, so that a run reports
only what it checked.
"""

from __future__ import annotations

import gc
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

#: Two cores: two threads for one process, one for each of several (pytest -n).
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2


def pytest_collection_finish() -> None:
    torch.set_num_threads(THREADS)  # after every module that sets it while it is collected


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(scope="module", autouse=True)
def _settled_heap() -> None:
    """Objects of libraries and earlier modules are exempt from garbage collection.

    With torch.compile and the model libraries loaded, one ``gc.collect()`` takes over a second, and
    benchmarks and the engine collect several times in a test.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def device() -> torch.device:
    """Where kernels run in this process."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def randn(device: torch.device):
    """Seeded normal numbers on the device of the test."""
    generator = torch.Generator().manual_seed(7)

    def make(*shape, dtype=torch.float32, spread=1.0):
        return (spread * torch.randn(*shape, generator=generator)).to(dtype).to(device)

    return make


@pytest.fixture
def brief_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warm-up call and two samples: for tests that look at records, not at the timing."""
    monkeypatch.setattr("fastswin.bench.timing.MIN_WARMUP_CALLS", 1)
    monkeypatch.setattr("fastswin.bench.timing.WARMUP_S", 0.0)
    monkeypatch.setattr("fastswin.bench.timing.MIN_SAMPLES", 2)
