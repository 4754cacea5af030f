"""Attention on compact tables assembles for every GPU generation and reads as wide as on dense."""

from __future__ import annotations

from pathlib import Path

import pytest
from ahead_of_time import compile_each

from fastswin.testing.aot import SHARED_MEMORY_LIMIT

SCRIPT = Path(__file__).with_name("compile_compact_bias.py")

#: One process compiles for all.
RUNS = {capability: (str(capability),) for capability in (80, 86, 89, 90)}

#: Registers a thread with which four programs of 128 threads are resident.
FOUR_PROGRAMS = 128


@pytest.mark.parametrize("capability", RUNS, ids="sm_{}".format)
def test_it_fits_the_card_and_reads_whole_vectors(capability):
    kernels = compile_each(SCRIPT, tuple(RUNS.values()))[list(RUNS).index(capability)]
    assert {k["name"] for k in kernels} == {"_window_attention_fwd_online_kernel"}
    assert [k for k in kernels if k["shared_bytes"] > SHARED_MEMORY_LIMIT[capability] * 1024] == []
    assert [k for k in kernels if k["spill_bytes"]] == []
    forms = {(k["window"], k["shifted"], k["table"]): k for k in kernels}
    pairs = {"short": "dense", "fp32": "dense fp32"}
    compared = 0
    for (window, shifted, table), kernel in forms.items():
        if table in pairs:
            dense = forms[window, shifted, pairs[table]]
            assert kernel["reads"] == dense["reads"]
            assert kernel["reads"].get("0x10", 0) >= 24  # copies of 16 bytes
            assert kernel["shared_bytes"] == dense["shared_bytes"]
            compared += 1
    assert compared == 5


def test_as_many_programs_are_resident_on_hopper():
    kernels = compile_each(SCRIPT, tuple(RUNS.values()))[list(RUNS).index(90)]
    assert [k for k in kernels if k["table"] == "short" and k["registers"] > FOUR_PROGRAMS] == []
    assert {k["dependent"] for k in kernels} == {True}
