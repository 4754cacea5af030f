"""The Hopper form of heads over long windows on a card: fp64, the same bits in every run."""

from __future__ import annotations

import pytest
import torch
from hopper_heads_cases import make_problem

from fastswin.ops.attention_half.hopper_launch import hopper_long_fwd
from fastswin.testing.tolerance import assert_close_to_oracle

pytestmark = pytest.mark.gpu

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def check(problem):
    """Three runs of the same bits, the first where NaN has been in the result's memory."""
    x, stats = problem.made["x"], problem.statistics()
    packed, weight, vectors, table, _, *rest = problem.packed()
    poison = torch.full_like(x, float("nan"))
    del poison
    runs = [
        hopper_long_fwd(packed, weight, vectors, table, *rest, pdl=pdl, norm_stats=stats)
        for pdl in (False, True, True)
    ]
    assert all(torch.equal(runs[0], other) for other in runs[1:])
    assert_close_to_oracle(
        runs[0], problem.reference(x.dtype), problem.reference(torch.float64), x.dtype
    )


@pytest.mark.parametrize("shift", [(0, 0), (6, 6)], ids=["plain", "shifted"])
@pytest.mark.parametrize("heads", [4, 6, 8, 12, 16, 24])
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_stages_of_the_published_models(dtype, heads, shift, cuda):
    check(make_problem(
        window=(12, 12), shift=shift, heads=heads, parts=heads // 2, dtype=dtype, device=cuda
    ))  # fmt: skip


@pytest.mark.parametrize("parts", [1, None], ids=["norm", "as they are"])
@pytest.mark.parametrize("window", [(10, 13), (8, 20), (43, 3)], ids=str)
def test_windows_that_are_not_square(window, parts, cuda):
    shift = (window[0] // 2, window[1] // 2)
    check(make_problem(
        batch=3, windows=(2, 3), window=window, shift=shift, heads=8, parts=parts, device=cuda
    ))  # fmt: skip


@pytest.mark.parametrize("heads", [8, 16, 24])
def test_a_batch_that_fills_the_card(heads, cuda):
    check(make_problem(
        batch=32, windows=(2, 2), window=(12, 12), shift=(6, 6), heads=heads, device=cuda,
        offset=20.0,
    ))  # fmt: skip
