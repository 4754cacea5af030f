"""Operator tests start from NaN-filled allocations, so an unwritten element shows."""

from __future__ import annotations

import pytest
import torch

from fastswin._triton.cluster import why_no_clusters
from fastswin._triton.device import device_capability
from fastswin.testing.poison import PoisonEmpty


@pytest.fixture(autouse=True)
def poisoned_allocations():
    with PoisonEmpty():
        yield


@pytest.fixture
def cuda():
    """A GPU that runs kernels in clusters; tests that ask for it are skipped elsewhere."""
    device = torch.device("cuda")
    if reason := why_no_clusters(device.type, device_capability(device)):
        pytest.skip(reason)
    return device
