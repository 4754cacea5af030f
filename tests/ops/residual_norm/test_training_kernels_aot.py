"""The training kernels assemble for every GPU generation, within shared memory, without spills."""

from __future__ import annotations

from pathlib import Path

import pytest
from ahead_of_time import compile_each

from fastswin.testing.aot import SHARED_MEMORY_LIMIT

SCRIPT = Path(__file__).with_name("compile_training_kernels.py")
KERNELS = {
    "_residual_norm_fwd_kernel", "_residual_norm_bwd_kernel", "_sum_partials_kernel",
    "_gelu_bwd_kernel", "_gather_layer_norm_fwd_kernel", "_gather_layer_norm_bwd_kernel",
}  # fmt: skip


#: One process compiles for both.
RUNS = {75: ("75", "sample"), 90: ("90", "all")}


@pytest.mark.parametrize("capability", RUNS, ids="sm_{}".format)
def test_kernels_fit_the_card(capability):
    kernels = compile_each(SCRIPT, tuple(RUNS.values()))[list(RUNS).index(capability)]
    assert {k["name"] for k in kernels} == KERNELS
    limit = SHARED_MEMORY_LIMIT[capability] * 1024
    assert [k for k in kernels if k["shared_bytes"] > limit] == []
    assert [k for k in kernels if k["spill_bytes"] > 0] == []
