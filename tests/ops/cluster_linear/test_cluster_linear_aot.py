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


def named(kernels):
    """What of kernels tells them apart."""
    names = ("block_m", "block_n", "splits", "block_k", "slots", "steps", "share_rows",
             "share_columns", "form", "dtype")  # fmt: skip
    return [tuple(k[name] for name in names) for k in kernels]


def test_forms_fit_the_card():
    kernels = compiled()
    tiles = {(k["block_m"], k["block_n"]) for k in kernels}
    assert tiles == set(itertools.product((16, 32, 64, 128), (64, 128)))
    assert {k["block_k"] for k in kernels} == {64, 128, 256}
    assert {k["splits"] for k in kernels} == {1, 2, 4, 8}
    assert {k["dtype"] for k in kernels} == {"fp16", "bf16"}
    assert {k["form"] for k in kernels} == {"qkv", "fc1", "proj", "post-norm"}
    assert {k["share_rows"] for k in kernels} == {1, 2, 3, 4}
    assert {k["share_columns"] for k in kernels} == {1, 2, 4, 8}
    assert max(k["steps"] - k["slots"] for k in kernels) >= 16  # rings that are filled again
    limit = SHARED_MEMORY_LIMIT[90] * 1024
    assert named(k for k in kernels if k["shared_bytes"] + k["tail_bytes"] > limit) == []
    # launched ahead, it both triggers and waits
    assert all(k["dependent"] is True for k in kernels)


def test_nothing_is_spilled_and_no_product_waits_for_another():
    """Not of rings that are filled again sixteen times either, nor by a longer ring."""
    assert named(k for k in compiled() if k["spill_bytes"]) == []
    assert named(k for k in compiled() if k["serialized"]) == []


def test_the_compiler_counts_the_ring_and_nothing_else():
    """So the ring begins where shared memory begins, which ``ring_address`` relies on.

    What the compiler adds behind the products, for values that change threads, lies in the ring's
    own memory, which it takes for free then. The tail comes behind: together they are what the
    configuration counts.
    """
    assert named(k for k in compiled() if k["shared_bytes"] != k["ring_bytes"]) == []
    assert all(k["counted"] == k["ring_bytes"] + k["tail_bytes"] for k in compiled())


def test_the_compiler_stores_nothing_into_the_ring_while_products_read_it():
    """It does not know that products which nobody has waited for still read their operands."""
    assert named(k for k in compiled() if k["stores_under_way"]) == []


def test_descriptors_have_the_names_that_the_kernel_gives_them():
    """Under the installed Triton: 128 bytes, aligned as the copy engine needs them."""
    for k in compiled():
        assert k["x_parameter"] == ".param .align 64 .b8 _cluster_linear_kernel_param_1[128]"
        assert k["weight_parameter"] == ".param .align 64 .b8 _cluster_linear_kernel_param_6[128]"
