"""The resident kernels' forms assemble for compute capability 9.0, within its limits."""

from __future__ import annotations

from pathlib import Path

from ahead_of_time import compile_each

from fastswin.ops.hopper_resident.config import (
    RESIDENT_BYTES,
    ResidentMlpConfig,
    ResidentProductConfig,
)
from fastswin.testing.aot import SHARED_MEMORY_LIMIT

SCRIPT = Path(__file__).with_name("compile_resident.py")

#: Registers spilled per thread, in bytes, by form and channels, with Triton 3.8; with 3.6, of which
#: the measured times are, 40 and none.
SPILL_BYTES = {("mlp, norm first", 128): 120, ("mlp, norm behind", 128): 20}


def test_forms_fit_the_card():
    (kernels,) = compile_each(SCRIPT, ((),))
    forms = {(k["form"], k["C"]) for k in kernels}
    assert forms == {(form, C) for form in ("product", "mlp, norm first", "mlp, norm behind")
                     for C in (96, 128)}  # fmt: skip
    assert {k["config"]["groups"] for k in kernels if k["form"] == "product"} == {3, 4}
    assert {k["dtype"] for k in kernels} == {"fp16", "bf16"}
    over = [k for k in kernels if k["shared_bytes"] > SHARED_MEMORY_LIMIT[90] * 1024]
    assert over == []

    def allowed(k):
        return SPILL_BYTES.get((k["form"], k["C"]), 0)

    assert [k for k in kernels if k["spill_bytes"] > allowed(k)] == []
    # the product is never launched ahead; the MLP both triggers and waits
    assert all(k["dependent"] is (None if k["form"] == "product" else True) for k in kernels)


def test_products_do_not_wait_for_each_other():
    (kernels,) = compile_each(SCRIPT, ((),))
    assert [k for k in kernels if k["serialized"]] == []


def test_shared_memory_is_what_the_configuration_says():
    """But for barriers and what a sum over warps would take: less than 1 KiB."""
    (kernels,) = compile_each(SCRIPT, ((),))
    for k in kernels:
        C = k["C"]
        if k["form"] == "product":
            counted = ResidentProductConfig(**k["config"]).shared_bytes(3 * C, C)
        else:
            counted = ResidentMlpConfig(**k["config"]).shared_bytes(4 * C, C)
        assert counted <= RESIDENT_BYTES
        assert counted < k["shared_bytes"] < counted + 1024
