"""The 8-bit kernels that launchers pick assemble for every generation that has them."""

from __future__ import annotations

from pathlib import Path

import pytest
from ahead_of_time import compile_each

from fastswin.testing.aot import SHARED_MEMORY_LIMIT

SCRIPT = Path(__file__).with_name("compile_quantized_kernels.py")

#: Registers spilled per thread, in bytes, that do not show beside a kernel's loads.
SPILL_BYTES = 64

#: The MLP of 192 channels with 128 hidden units a step, timed as the fastest of seven tiles.
MLP_SPILL_BYTES = 192

KERNELS = {
    "_window_attention_fwd_kernel", "_layer_norm_fwd_kernel",
    "_gather_quantize_kernel", "_quantize_kernel", "_quantize_per_token_kernel",
    "_quantized_linear_kernel", "_quantized_mlp_kernel",
}  # fmt: skip

LARGE = {"_window_attention_fwd_kernel", "_quantized_linear_kernel", "_quantized_mlp_kernel"}

HOPPER = {
    "_quantized_linear_tma_kernel", "_window_attention_fwd_online_kernel",
    "_split_k_linear_kernel", "_add_split_k_kernel",
}  # fmt: skip

#: Kernels of many rows only: not launched before their predecessor is done.
ALONE = {"_quantized_mlp_kernel", "_window_attention_fwd_online_kernel"}

#: One process compiles for all.
RUNS = {capability: (str(capability),) for capability in (80, 86, 89, 90)}


def allowed_spill(kernel: dict) -> int:
    mlp = kernel["name"] == "_quantized_mlp_kernel" and kernel["capability"] == 90
    return MLP_SPILL_BYTES if mlp and kernel["constants"]["CB"] else SPILL_BYTES


@pytest.mark.parametrize("capability", RUNS, ids="sm_{}".format)
def test_default_choices_fit_the_card(capability):
    kernels = compile_each(SCRIPT, tuple(RUNS.values()))[list(RUNS).index(capability)]
    assert {k["name"] for k in kernels} == {
        86: LARGE, 89: LARGE, 90: KERNELS | HOPPER,
    }.get(capability, KERNELS)  # fmt: skip
    assert [k for k in kernels if k["shared_bytes"] > SHARED_MEMORY_LIMIT[capability] * 1024] == []
    assert [k for k in kernels if k["spill_bytes"] > allowed_spill(k)] == []
    ahead = [k for k in kernels if k["options"].get("launch_pdl")]
    assert {k["name"] for k in ahead} == (
        {*KERNELS, *HOPPER} - ALONE if capability == 90 else set()
    )
    assert all(k["dependent"] is (k in ahead or None) for k in kernels)
