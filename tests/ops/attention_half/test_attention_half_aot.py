"""The kernels that the launchers pick assemble for every generation that has tensor cores."""

from __future__ import annotations

from pathlib import Path

import pytest
from ahead_of_time import compile_each

from fastswin.testing.aot import SHARED_MEMORY_LIMIT

SCRIPT = Path(__file__).with_name("compile_attention_half_kernels.py")

#: Registers spilled per thread, in bytes: on Hopper one of 192 channels by windows, timed as the
#: fastest form there (docs/performance.md), and three numbers outside the loop over heads of three
#: groups that do the whole half, elsewhere what a kernel's loads hide.
SPILL_BYTES = {80: 64, 86: 64, 89: 64, 90: 12}

RUNS = {capability: (str(capability),) for capability in (80, 86, 89, 90)}

KERNELS = {
    80: {"_heads_kernel"},
    86: {"_whole_window_kernel"},
    89: {"_whole_window_kernel"},
    90: {
        "_heads_kernel",
        "_whole_window_kernel",
        "_hopper_heads_kernel",
        "_hopper_windows_kernel",
        "_hopper_whole_kernel",
    },
}


@pytest.mark.parametrize("capability", RUNS, ids="sm_{}".format)
def test_default_choices_fit_the_card(capability):
    kernels = compile_each(SCRIPT, tuple(RUNS.values()))[list(RUNS).index(capability)]
    assert {k["name"] for k in kernels} == KERNELS[capability]
    assert [k for k in kernels if k["shared_bytes"] > SHARED_MEMORY_LIMIT[capability] * 1024] == []
    assert [k for k in kernels if k["spill_bytes"] > SPILL_BYTES[capability]] == []
    assert [k for k in kernels if k["serialized"]] == []
    assert {k["dependent"] for k in kernels} == {True if capability == 90 else None}


def test_rows_behind_a_window_become_zeros():
    """Keys and values that follow from them are finite, as hopper_tile.py's attention needs."""
    kernels = compile_each(SCRIPT, tuple(RUNS.values()))[list(RUNS).index(90)]
    found = {(k["name"], k["fills_with_zeros"]) for k in kernels if "fills_with_zeros" in k}
    assert found == {(name, True) for name in KERNELS[90] if name.startswith("_hopper")}
