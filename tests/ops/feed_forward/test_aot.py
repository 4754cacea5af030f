"""The feed-forward layer's kernels assemble for every GPU generation within its limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastswin.testing.aot import SHARED_MEMORY_LIMIT

SCRIPT = Path(__file__).with_name("compile_feed_forward_kernels.py")

#: Registers spilled per thread, in bytes, that do not show beside a kernel's loads: 128 registers
#: let two programs of 8 warps share a multiprocessor (Triton 3.6 spills 64 at 128 channels).
SPILL_BYTES = 64

#: Widths for each generation: all on Hopper, the narrowest or the widest elsewhere.
WIDTHS = {80: "192", 86: "192", 89: "96", 90: "96,128,192"}


@pytest.mark.parametrize("capability", WIDTHS, ids="sm_{}".format)
def test_default_choices_fit_the_card(capability):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(capability), WIDTHS[capability]],
        capture_output=True, text=True, check=False, timeout=500,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {k["name"] for k in kernels} == {"_fused_fwd_kernel", "_fused_bwd_kernel"}
    limit = SHARED_MEMORY_LIMIT[capability] * 1024
    assert [k for k in kernels if k["shared_bytes"] > limit] == []
    assert [k for k in kernels if k["spill_bytes"] > SPILL_BYTES] == []
