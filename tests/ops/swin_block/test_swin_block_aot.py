"""The cluster kernel's forms assemble for compute capability 9.0, within its limits."""

from __future__ import annotations

from pathlib import Path

from ahead_of_time import compile_each

from fastswin.ops.swin_block.config import HEAD_DIM
from fastswin.testing.aot import SHARED_MEMORY_LIMIT

SCRIPT = Path(__file__).with_name("compile_swin_block.py")

#: Bytes of registers that may be spilled: Triton 3.6 spills 56 with six heads, 3.8 none.
SPILL_BYTES = 64

#: Shared memory beside the weights: keys and values, barriers.
BESIDE = 2 * 64 * HEAD_DIM * 2 + 32


def test_forms_fit_the_card():
    (kernels,) = compile_each(SCRIPT, ((),))
    forms = {(k["heads"], k["version"], k["dtype"]) for k in kernels}
    assert forms == {(heads, version, dtype) for heads in (2, 3, 4, 6) for version in (1, 2)
                     for dtype in ("fp16", "bf16")}  # fmt: skip
    limit = SHARED_MEMORY_LIMIT[90] * 1024
    assert [k for k in kernels if k["shared_bytes"] + k["tail_bytes"] > limit] == []
    assert [k for k in kernels if k["spill_bytes"] > SPILL_BYTES] == []
    assert [k for k in kernels if k["serialized"]] == []
    # launched ahead, it both triggers and waits
    assert all(k["dependent"] is True for k in kernels)


def test_shared_memory_is_that_of_the_weights():
    """Tiles that are seen as smaller ones take no place of their own."""
    (kernels,) = compile_each(SCRIPT, ((),))
    for k in kernels:
        weights = 768 * HEAD_DIM * k["heads"]
        assert weights < k["shared_bytes"] <= weights + BESIDE
