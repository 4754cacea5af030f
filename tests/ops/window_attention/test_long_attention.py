"""Attention of few long windows for Hopper on a CPU: its own source, and who may take it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ahead_of_time import compile_each
from gluon_threads import Descriptor, Pointer, run_source
from group_copies import Copies
from long_attention_cases import make_problem

from fastswin.ops.window_attention import forward_hopper, launch_hopper
from fastswin.ops.window_attention.config import padded_tokens
from fastswin.ops.window_attention.hopper_config import hopper_attention_blocker
from fastswin.ops.window_attention.packing import LOG2_E
from fastswin.testing.aot import SHARED_MEMORY_LIMIT
from fastswin.testing.tolerance import assert_close_to_oracle

SCRIPT = Path(__file__).with_name("compile_hopper_attention.py")


def run_on_cpu(problem, copies=None):
    """What the kernel writes into NaN, with NaN in shared memory."""
    qkv, table, scale, heads, window, shift = problem.packed(half_table=False)
    B, H, W, channels = qkv.shape
    C, tokens = channels // 3, window[0] * window[1]
    per_col, per_row = H // window[0], W // window[1]
    out = qkv.new_full((B, H, W, C), float("nan"))
    NP = padded_tokens(tokens)
    rows_of_keys = table.reshape(-1, NP)
    arguments = (
        Pointer(qkv.view(-1)), Descriptor(rows_of_keys, [64, 64]),
        Descriptor(rows_of_keys, [64, NP - 128]), Pointer(out.view(-1)), scale * LOG2_E,
        H, W, per_col, per_row,
    )  # fmt: skip
    constants = {
        "C": C, "NH": heads, "N": tokens, "NP": NP,
        "WH": window[0], "WW": window[1], "SH": shift[0], "SW": shift[1], "REGISTERS": 0,
        "PDL": False,
    }  # fmt: skip
    run_source(
        forward_hopper, "_hopper_attention_kernel", B * per_col * per_row * heads, arguments,
        constants, async_copy=copies or Copies(),
    )  # fmt: skip
    return out


SETTINGS = [
    {},
    {"shift": (0, 0), "windows": (1, 3), "heads": 3},
    {"window": (10, 13), "shift": (5, 0), "windows": (2, 1)},
    {"window": (8, 20), "shift": (4, 10), "batch": 2, "windows": (1, 2), "heads": 1},
    {"window": (43, 3), "shift": (21, 1), "windows": (1, 2)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_source_on_a_cpu(settings):
    problem = make_problem(**settings)
    assert_close_to_oracle(
        run_on_cpu(problem), problem.reference(torch.float16), problem.reference(torch.float64),
        torch.float16,
    )  # fmt: skip


def test_rows_that_are_read_before_they_are_there_would_show():
    class Hasty(Copies):
        def wait_group(self, behind):
            pass

    assert run_on_cpu(make_problem(), Hasty()).isnan().any()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"C": 96}, "heads of 32 channels are needed, not 2 in 96"),
        ({"window_size": (8, 16), "map_size": (16, 16)}, "129 to 160 tokens are needed, not 128"),
        ({"window_size": (7, 23), "map_size": (7, 23)}, "129 to 160 tokens are needed, not 161"),
        ({"map_size": (24, 25)}, r"a map of \(24, 25\) is no multiple of a window of \(12, 12\)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_windows_that_it_does_not_take(changed, words):
    half = {"C": 64, "num_heads": 2, "window_size": (12, 12), "map_size": (24, 24)}
    assert hopper_attention_blocker(**half) is None
    reason = hopper_attention_blocker(**half | changed)
    assert reason is not None
    with pytest.raises(ValueError, match=words):
        raise ValueError(reason)


def test_a_shape_that_does_not_fit_is_refused_before_anything_is_launched():
    qkv = torch.zeros(1, 24, 25, 192, dtype=torch.float16)
    with pytest.raises(ValueError, match="qkv does not fit: a map"):
        launch_hopper.hopper_attention_fwd(
            qkv, torch.zeros(4, 2, 144, 144), 0.2, 2, (12, 12), (6, 6)
        )


def test_it_fits_the_card():
    (kernels,) = compile_each(SCRIPT, ((),))
    assert len(kernels) == 8
    assert {k["name"] for k in kernels} == {"_hopper_attention_kernel"}
    assert [k for k in kernels if k["shared_bytes"] > SHARED_MEMORY_LIMIT[90] * 1024] == []
    assert [k for k in kernels if k["spill_bytes"] or k["serialized"]] == []
    assert {k["dependent"] for k in kernels} == {True}
    assert {k["fills_with_zeros"] for k in kernels} == {True}  # keys behind a window are finite
