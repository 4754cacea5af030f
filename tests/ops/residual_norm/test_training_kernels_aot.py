"""The training kernels assemble for every GPU generation, within shared memory, without spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastswin.testing.aot import SHARED_MEMORY_LIMIT

SCRIPT = Path(__file__).with_name("compile_training_kernels.py")
KERNELS = {
    "_residual_norm_fwd_kernel", "_residual_norm_bwd_kernel", "_sum_partials_kernel",
    "_gelu_bwd_kernel",
}  # fmt: skip


@pytest.mark.parametrize("capability", [75, 90], ids="sm_{}".format)
def test_kernels_fit_the_card(capability):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(capability), "all" if capability == 90 else "sample"],
        capture_output=True, text=True, check=False, timeout=500,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {k["name"] for k in kernels} == KERNELS
    limit = SHARED_MEMORY_LIMIT[capability] * 1024
    assert [k for k in kernels if k["shared_bytes"] > limit] == []
    assert [k for k in kernels if k["spill_bytes"] > 0] == []
