"""Every kernel assembles for every GPU generation, inside its shared memory and without spills."""

from pathlib import Path

import pytest
from ahead_of_time import compile_each

from fastswin.testing.aot import SHARED_MEMORY_LIMIT

#: Bytes of registers spilled per thread that are tolerated; the kernels are bound by memory.
SPILL_BYTES = 0

SCRIPT = Path(__file__).with_name("compile_softmax_kernels.py")


#: One process compiles for all.
RUNS = {capability: (str(capability), "float16") for capability in (75, 80, 86, 89, 90)}


@pytest.mark.parametrize("capability", RUNS, ids="sm_{}".format)
def test_compiles(capability):
    kernels = compile_each(SCRIPT, tuple(RUNS.values()))[list(RUNS).index(capability)]
    assert len({k["name"] for k in kernels}) == 7
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_MEMORY_LIMIT[capability] * 1024, kernel
        assert kernel["spill_bytes"] <= SPILL_BYTES, kernel
