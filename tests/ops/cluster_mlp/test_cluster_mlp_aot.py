"""Forms of the MLP in clusters assemble for compute capability 9.0, within its limits."""

from __future__ import annotations

from pathlib import Path

from ahead_of_time import compile_each

from fastswin.testing.aot import SHARED_MEMORY_LIMIT

SCRIPT = Path(__file__).with_name("compile_cluster_mlp.py")


def compiled():
    (kernels,) = compile_each(SCRIPT, ((),))
    return kernels


def test_forms_fit_the_card():
    kernels = compiled()
    limit = SHARED_MEMORY_LIMIT[90] * 1024
    assert [k for k in kernels if k["shared_bytes"] + k["tail_bytes"] > limit] == []
    assert [k for k in kernels if k["spill_bytes"] or k["serialized"]] == []
    assert [k for k in kernels if k["most_registers"] < 232] == []
    # launched ahead, it both triggers and waits
    assert all(k["dependent"] is True for k in kernels)


def test_shared_memory_is_what_the_configuration_counts():
    for k in compiled():
        assert k["ring"] < k["shared_bytes"]
        assert k["shared_bytes"] + k["tail_bytes"] <= k["counted"]


def test_warp_groups_do_not_meet():
    assert [k for k in compiled() if k["meetings"]] == []
