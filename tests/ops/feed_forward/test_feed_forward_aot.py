"""The feed-forward layer's kernels assemble for every GPU generation within its limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from ahead_of_time import compile_each

from fastswin.testing.aot import SHARED_MEMORY_LIMIT

SCRIPT = Path(__file__).with_name("compile_feed_forward_kernels.py")

#: Registers spilled per thread, in bytes, that do not show beside a kernel's loads: 128 registers
#: let two programs of 8 warps share a multiprocessor (Triton 3.6 spills 64 at 128 channels).
SPILL_BYTES = 64

#: Widths for each generation: both forms of the heuristic on Hopper, one elsewhere.
WIDTHS = {80: "96", 86: "192", 89: "96", 90: "128,192"}


#: One process compiles for all.
RUNS = {capability: (str(capability), widths) for capability, widths in WIDTHS.items()}


@pytest.mark.parametrize("capability", RUNS, ids="sm_{}".format)
def test_default_choices_fit_the_card(capability):
    kernels = compile_each(SCRIPT, tuple(RUNS.values()))[list(RUNS).index(capability)]
    assert {k["name"] for k in kernels} == {"_fused_fwd_kernel", "_fused_bwd_kernel"}
    limit = SHARED_MEMORY_LIMIT[capability] * 1024
    assert [k for k in kernels if k["shared_bytes"] > limit] == []
    assert [k for k in kernels if k["spill_bytes"] > SPILL_BYTES] == []
