"""Every backward kernel assembles for every GPU generation, within its memory and spill bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from ahead_of_time import compile_each

from fastswin.testing.aot import SHARED_MEMORY_LIMIT

SCRIPT = Path(__file__).with_name("compile_attention_backward.py")

#: Registers spilled per thread, in bytes, that do not show beside a kernel's loads.
SPILL_BYTES = 64

#: With dropout, ten rounds of Philox per weight spill; the models ship with attn_drop_rate 0.
DROPOUT_SPILL_BYTES = 700


#: One process compiles for all.
RUNS = {capability: (str(capability), "fp16", "0", "1") for capability in (80, 86, 89, 90)}


@pytest.mark.parametrize("capability", RUNS, ids="sm_{}".format)
def test_compiles(capability):
    kernels = compile_each(SCRIPT, tuple(RUNS.values()))[list(RUNS).index(capability)]
    names = {k["name"] for k in kernels}
    assert ("_window_attention_bwd_runs_kernel" in names) == (capability >= 90)
    assert len(names) == 7 + (capability >= 90)
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_MEMORY_LIMIT[capability] * 1024, kernel
        constants = kernel["constants"]
        bound = DROPOUT_SPILL_BYTES if constants.get("DROPOUT") else SPILL_BYTES
        assert kernel["spill_bytes"] <= bound, kernel
