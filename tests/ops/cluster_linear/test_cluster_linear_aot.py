"""Forms of the product in clusters assemble for compute capability 9.0, within its limits."""

from __future__ import annotations

import itertools
from pathlib import Path

from ahead_of_time import compile_each

from fastswin.testing.aot import SHARED_MEMORY_LIMIT

SCRIPT = Path(__file__).with_name("compile_cluster_linear.py")


def compiled():
    (kernels,) = compile_each(SCRIPT, ((),))
    return kernels


def test_forms_fit_the_card():
    kernels = compiled()
    tiles = {(k["block_m"], k["block_n"]) for k in kernels}
    assert tiles == {*itertools.product((64, 128), (64, 128)), (16, 64), (16, 128), (32, 64)}
    assert {k["block_k"] for k in kernels} == {64, 128, 256}
    assert {k["splits"] for k in kernels} == {1, 2, 4, 8}
    assert {k["dtype"] for k in kernels} == {"fp16", "bf16"}
    assert {k["form"] for k in kernels} == {"qkv", "fc1", "proj", "post-norm"}
    assert any(k["slots"] < k["steps"] for k in kernels)  # rings that are filled again
    limit = SHARED_MEMORY_LIMIT[90] * 1024
    assert [k for k in kernels if k["shared_bytes"] + k["tail_bytes"] > limit] == []
    assert [k for k in kernels if k["spill_bytes"] or k["serialized"]] == []
    # launched ahead, it both triggers and waits
    assert all(k["dependent"] is True for k in kernels)


def test_shared_memory_is_what_the_configuration_counts():
    """A ring, its barriers, the tail; nothing that the compiler adds exceeds what is counted."""
    for k in compiled():
        ring = k["slots"] * 2 * k["block_k"] * (k["block_m"] + k["block_n"])
        assert ring < k["shared_bytes"]
        assert k["shared_bytes"] + k["tail_bytes"] <= k["counted"]
