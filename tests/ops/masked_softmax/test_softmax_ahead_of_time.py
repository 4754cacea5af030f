"""Every kernel assembles for every GPU generation, inside its shared memory and without spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastswin.testing.aot import SHARED_MEMORY_LIMIT

#: Bytes of registers spilled per thread that are tolerated; the kernels are bound by memory.
SPILL_BYTES = 0

SCRIPT = Path(__file__).with_name("compile_softmax_kernels.py")


@pytest.mark.parametrize("dtype", ["float16"])
@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90])
def test_compiles(capability, dtype):
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(capability), dtype],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({k["name"] for k in kernels}) == 7
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_MEMORY_LIMIT[capability] * 1024, kernel
        assert kernel["spill_bytes"] <= SPILL_BYTES, kernel
