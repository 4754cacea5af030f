"""benchmarks/micro/timeline.py: stamps in the kernel's own source, and what is said of them."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "benchmarks" / "micro" / "timeline.py"


@pytest.fixture(scope="module")
def timeline():
    spec = importlib.util.spec_from_file_location("timeline", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_event_is_noted_once_in_the_kernel(timeline):
    text = timeline.stamped(timeline.kernel_source())
    tree = ast.parse(text)
    (kernel,) = (f for f in tree.body if getattr(f, "name", "") == "_cluster_linear_kernel")
    calls = [c for c in ast.walk(kernel) if isinstance(c, ast.Call)]
    numbers = [c.args[1].value for c in calls if getattr(c.func, "id", "") == "_stamp"]
    assert sorted(numbers) == list(range(len(timeline.EVENTS)))
    assert "if WRITE_STATS:" not in text  # what the kernel's statistics would overwrite


def test_a_source_that_lacks_a_place_is_refused(timeline):
    text = timeline.kernel_source().replace(
        "    LINES: gl.constexpr = ", "    ROWS_: gl.constexpr = "
    )
    with pytest.raises(ValueError, match="x asked: the source has 0 times"):
        timeline.stamped(text)


def test_table_of_a_chain(timeline):
    """Each launch begins 1 us behind the last end and notes an event every 2 us, 3 programs 1 us
    apart from each other."""
    events = len(timeline.EVENTS)
    clock = torch.zeros(2 * timeline.BLOCKS, timeline.PROGRAMS, timeline.PLACES, dtype=torch.int64)
    end = 1_000_000
    for launch in clock:
        for program in range(3):
            launch[program, :events] = end + 1000 * (1 + program + 2 * torch.arange(events))
        end = int(launch.max())
    header, *lines = timeline.table(clock)
    assert header.split() == ["us", "earliest", "median", "latest"]
    assert len(lines) == 2 * events
    for number, line in enumerate(lines):
        first = 1.0 + 2 * (number % events)
        assert [float(word) for word in line.split()[-3:]] == [first, first + 1, first + 2]
