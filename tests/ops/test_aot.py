"""What the launchers pick for Swin-T, B and L assembles for every GPU generation, within limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from ahead_of_time import compile_each

from fastswin.testing.aot import SHARED_MEMORY_LIMIT, idle_barriers

SCRIPT = Path(__file__).with_name("compile_block_kernels.py")

CAPABILITIES = [75, 80, 86, 89, 90, 120]

#: Registers spilled per thread, in bytes, that do not show beside a kernel's loads.
SPILL_BYTES = 64

#: Known spills, bounded so that they cannot grow; where nothing else is said, not yet timed against
#: a form without them.
KNOWN_SPILL_BYTES = {
    "V2 fused MLP at 256 channels, which the engine's plan never takes": (
        lambda k: k["capability"] == 90 and k["constants"].get("CA") == 256
        and k["constants"].get("POST_NORM") is True, 300),
    "one-shot products of few rows, timed as the fastest of their layers (docs/performance.md)": (
        lambda k: k["capability"] == 90 and k["name"] == "_one_shot_linear_kernel", 68),
}  # fmt: skip

KERNELS = {
    "_window_attention_fwd_kernel",
    "_window_attention_fwd_online_kernel",
    "_layer_norm_linear_fwd_kernel",
    "_mlp_fwd_kernel",
    "_layer_norm_fwd_kernel",
    "_gather_neighbours_fwd_kernel",
    "_norm_sum_kernel",
    "_mean_affine_kernel",
    "_patch_embed_fwd_kernel",
    "_norm_pool_head_kernel",
}

#: Kernels of few rows, from compute capability 8.0.
FEW_ROWS = {"_one_shot_linear_kernel"}

#: Products cut along K, which the engine takes from 9.0 on (engine/small_batch.py).
SPLIT_K = {"_split_k_linear_kernel", "_add_split_k_kernel"}


#: All kernels on Hopper, a sample elsewhere; each of the two groups is one process.
RUNS = {c: (str(c), "all" if c == 90 else "sample", "0", "1") for c in CAPABILITIES}


def compiled(capability: int) -> list[dict]:
    group = [c for c in CAPABILITIES if (c == 90) == (capability == 90)]
    return compile_each(SCRIPT, tuple(RUNS[c] for c in group))[group.index(capability)]


def allowed_spill(kernel: dict) -> int:
    exceptions = [most for applies, most in KNOWN_SPILL_BYTES.values() if applies(kernel)]
    return max([SPILL_BYTES, *exceptions])


@pytest.mark.parametrize("capability", CAPABILITIES, ids="sm_{}".format)
def test_default_choices_fit_the_card(capability):
    kernels = compiled(capability)
    gemm = "_linear_fwd_tma_kernel" if capability >= 90 else "_linear_fwd_kernel"
    few_rows = FEW_ROWS if capability >= 80 else set()
    few_rows |= SPLIT_K if capability >= 90 else set()
    assert {k["name"] for k in kernels} == KERNELS | {gemm} | few_rows
    limit = SHARED_MEMORY_LIMIT[capability] * 1024
    over = [k for k in kernels if k["shared_bytes"] > limit]
    assert over == []
    spilling = [k for k in kernels if k["spill_bytes"] > allowed_spill(k)]
    assert spilling == []


@pytest.mark.parametrize("capability", CAPABILITIES, ids="sm_{}".format)
def test_dependent_launch_from_hopper_on_and_nowhere_below(capability):
    kernels = compiled(capability)
    assert all(k["dependent"] in (None, True) for k in kernels)  # triggers and waits, or neither
    found = {k["name"] for k in kernels if k["dependent"]}
    if capability < 90:
        assert found == set()
    else:
        assert found == {k["name"] for k in kernels}


#: A kernel's barriers in Triton's GPU dialect: one that a partition waits for, and another.
BARRIERS = """
    %used = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared1, #smem, mutable>
    %0 = ttg.memdesc_index %used[%c0] : !ttg.memdesc<2x1xi64, #shared1> -> !ttg.memdesc<1xi64>
    ttng.init_barrier %0, 1 : !ttg.memdesc<1xi64, #shared1, #smem, mutable>
    %used_1 = ttg.local_alloc : () -> !ttg.memdesc<1x1xi64, #shared1, #smem, mutable>
    %1 = ttg.memdesc_index %used_1[%c0] : !ttg.memdesc<1x1xi64, #shared1> -> !ttg.memdesc<1xi64>
    ttng.init_barrier %1, 3 : !ttg.memdesc<1xi64, #shared1, #smem, mutable>
    %rows = ttg.local_alloc : () -> !ttg.memdesc<64x64xf16, #shared, #smem, mutable>
"""


@pytest.mark.parametrize(
    ("uses", "idle"),
    [
        ("ttg.warp_specialize(%used, %rows)", 1),
        ("ttg.warp_specialize(%used, %used_1, %rows)", 0),
        ("ttng.wait_barrier %0, %c0\n ttng.arrive_barrier %1, 1, %true", 0),
        ("ttng.wait_barrier %10, %c0", 2),
    ],
)
def test_barriers_that_nobody_uses_are_found(uses, idle):
    """One destroyed another buffer's first values, on the card only (docs/performance.md)."""
    assert idle_barriers(f"{BARRIERS}    {uses}\n") == idle
