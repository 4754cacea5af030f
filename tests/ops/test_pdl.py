"""Programmatic dependent launch: a program triggers behind its wait, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fastswin
from fastswin.testing.aot import _dependent

PACKAGE = Path(fastswin.__file__).parent

WAIT, TRIGGER = "griddepcontrol.wait;\n", "griddepcontrol.launch_dependents;\n"


@pytest.mark.parametrize(
    ("ptx", "found"),
    [
        ("ld.global;", None),
        (WAIT + TRIGGER, True),
        (WAIT + "ld.global;\n" + TRIGGER + 2 * (WAIT + TRIGGER), True),
        (TRIGGER + WAIT, False),
        (TRIGGER + WAIT + TRIGGER, False),
        (WAIT, False),
        (TRIGGER, False),
        (WAIT + TRIGGER + WAIT, False),
    ],
    ids=str,
)
def test_what_ahead_of_time_tests_take_for_dependent(ptx, found):
    assert _dependent(ptx) is found


def test_one_function_waits_and_triggers():
    """Whatever a kernel does about its neighbours it does by ``wait_for_previous``."""
    users = {
        str(path.relative_to(PACKAGE)): re.findall(r"gdc_\w+|griddepcontrol", path.read_text())
        for path in PACKAGE.rglob("*.py")
    }
    assert {name: found for name, found in users.items() if found} == {
        "_triton/pdl.py": ["gdc_wait", "gdc_launch_dependents"],
        "testing/aot.py": ["griddepcontrol"],
        "bench/compile_ahead.py": ["griddepcontrol"],
    }
