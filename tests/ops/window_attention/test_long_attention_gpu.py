"""Attention of few long windows for Hopper on a card: fp64, the same bits in every run."""

from __future__ import annotations

import pytest
import torch
from long_attention_cases import make_problem

from fastswin._triton.device import HOPPER, device_capability
from fastswin.ops.window_attention.launch_hopper import hopper_attention_fwd
from fastswin.testing.poison import PoisonEmpty
from fastswin.testing.tolerance import assert_close_to_oracle

pytestmark = pytest.mark.gpu

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture
def cuda():
    device = torch.device("cuda")
    if device_capability(device) != HOPPER:
        pytest.skip("the kernel is written for compute capability 9.0")
    return device


def check(problem, half_table=False):
    qkv = problem.made["qkv"]
    with PoisonEmpty():
        runs = [
            hopper_attention_fwd(*problem.packed(half_table), pdl=pdl)
            for pdl in (False, True, True)
        ]
    assert all(torch.equal(runs[0], other) for other in runs[1:])
    assert_close_to_oracle(
        runs[0], problem.reference(qkv.dtype), problem.reference(torch.float64), qkv.dtype
    )


#: Heads and windows of Swin-B and L at 384 pixels, batch 1 and 2.
STAGES = [(4, (8, 8), 1), (8, (4, 4), 1), (16, (2, 2), 1), (32, (1, 1), 1), (24, (2, 2), 2)]


@pytest.mark.parametrize("shift", [(0, 0), (6, 6)], ids=["plain", "shifted"])
@pytest.mark.parametrize("stage", STAGES, ids=str)
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_stages_of_the_published_models(dtype, stage, shift, cuda):
    heads, windows, batch = stage
    check(make_problem(
        heads=heads, windows=windows, batch=batch, shift=shift, dtype=dtype, device=cuda
    ))  # fmt: skip


@pytest.mark.parametrize("window", [(10, 13), (8, 20), (43, 3)], ids=str)
def test_windows_that_are_not_square(window, cuda):
    shift = (window[0] // 2, window[1] // 2)
    check(make_problem(batch=3, windows=(2, 3), window=window, shift=shift, heads=5, device=cuda))


def test_a_batch_that_fills_the_card(cuda):
    check(make_problem(batch=32, windows=(4, 4), heads=8, device=cuda))


def test_a_table_in_half_precision(cuda):
    problem = make_problem(heads=16, device=cuda)
    problem.made["bias"] = problem.made["bias"].half().float()
    wide, half = (hopper_attention_fwd(*problem.packed(table)) for table in (False, True))
    assert (wide.float() - half.float()).abs().max() < 0.01
