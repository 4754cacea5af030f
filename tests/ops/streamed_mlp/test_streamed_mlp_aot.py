"""Forms of the streamed MLP assemble for compute capability 9.0, within its limits."""

from __future__ import annotations

from pathlib import Path

from ahead_of_time import compile_each

from fastswin.testing.aot import SHARED_MEMORY_LIMIT

SCRIPT = Path(__file__).with_name("compile_streamed_mlp.py")

#: Registers spilled per thread, in bytes, by channels and groups: in bfloat16, behind an offset,
#: before the first step, with Triton 3.8; with 3.6, of which the measured times are, 12.
SPILL_BYTES = {(192, 3): 700, (128, 3): 150}


def compiled():
    (kernels,) = compile_each(SCRIPT, ((),))
    return kernels


def test_forms_fit_the_card():
    kernels = compiled()
    assert {(k["C"], k["groups"], k["programs"]) for k in kernels} == {
        (128, 3, 1), (128, 2, 1), (128, 2, 2), (192, 3, 1), (192, 2, 1), (192, 2, 2), (256, 2, 1),
    }  # fmt: skip
    limit = SHARED_MEMORY_LIMIT[90] * 1024
    assert [k for k in kernels if k["shared_bytes"] + k["tail_bytes"] > limit] == []
    spilling = {(k["C"], k["groups"]): k["spill_bytes"] for k in kernels if k["spill_bytes"]}
    assert all(spilled <= SPILL_BYTES.get(form, 0) for form, spilled in spilling.items())
    assert all(k["dtype"] == "bf16" and k["offset"] for k in kernels if k["spill_bytes"])
    # launched ahead, it both triggers and waits
    assert all(k["dependent"] is True for k in kernels)


def test_products_do_not_wait_for_each_other():
    assert [k for k in compiled() if k["serialized"]] == []


def test_shared_memory_is_what_the_configuration_counts():
    for k in compiled():
        assert k["counted"] - 1024 < k["shared_bytes"] + k["tail_bytes"] <= k["counted"]
