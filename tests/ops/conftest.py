"""Operator tests start from NaN-filled allocations, so an unwritten element shows."""

from __future__ import annotations

import pytest

from fastswin.testing.poison import PoisonEmpty


@pytest.fixture(autouse=True)
def poisoned_allocations():
    with PoisonEmpty():
        yield
