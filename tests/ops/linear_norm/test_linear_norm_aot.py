"""Default tiles, and what the engine's table lists, assemble for every tensor-core generation."""

from __future__ import annotations

from pathlib import Path

import pytest
from ahead_of_time import compile_each

from fastswin.testing.aot import SHARED_MEMORY_LIMIT

SCRIPT = Path(__file__).with_name("compile_linear_norm_kernels.py")

#: Registers spilled per thread, in bytes.
SPILL_BYTES = {80: 64, 86: 64, 89: 64, 90: 4}

RUNS = {capability: (str(capability),) for capability in SPILL_BYTES}


@pytest.mark.parametrize("capability", RUNS, ids="sm_{}".format)
def test_tiles_fit_the_card(capability):
    kernels = compile_each(SCRIPT, tuple(RUNS.values()))[list(RUNS).index(capability)]
    assert {k["name"] for k in kernels} == {"_linear_add_norm_kernel"}
    assert [k for k in kernels if k["shared_bytes"] > SHARED_MEMORY_LIMIT[capability] * 1024] == []
    assert [k for k in kernels if k["spill_bytes"] > SPILL_BYTES[capability]] == []
    assert {k["dependent"] for k in kernels} <= {True if capability == 90 else None}
