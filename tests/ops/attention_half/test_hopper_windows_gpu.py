"""The Hopper form of heads over several windows on a card: fp64, the same bits in every run."""

from __future__ import annotations

import pytest
import torch
from hopper_heads_cases import make_problem

from fastswin.ops.attention_half.hopper_config import HopperWindowsConfig, hopper_windows_blocker
from fastswin.ops.attention_half.hopper_launch import hopper_windows_fwd
from fastswin.testing.tolerance import assert_close_to_oracle

pytestmark = pytest.mark.gpu

SHARES = [(1, 1, 1), (2, 1, 1), (3, 3, 1), (5, 2, 1), (3, 1, 2)]

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def check(problem, config=None, given=False):
    """Three runs of the same bits, the first where NaN has been in the result's memory."""
    x, stats = problem.made["x"], problem.statistics() if given else None
    poison = torch.full_like(x, float("nan"))
    del poison
    runs = [
        hopper_windows_fwd(*problem.packed(), pdl=pdl, norm_stats=stats, config=config)
        for pdl in (False, True, True)
    ]
    assert all(torch.equal(runs[0], other) for other in runs[1:])
    assert_close_to_oracle(
        runs[0], problem.reference(x.dtype), problem.reference(torch.float64), x.dtype
    )


#: Heads and (windows a program, groups, buffers) that find room.
FORMS = [
    (heads, config)
    for heads in (4, 6, 12, 16)
    for config in (*(HopperWindowsConfig(*form) for form in SHARES), None)
    if hopper_windows_blocker(32 * heads, heads, (7, 7), (14, 14), config) is None
]


@pytest.mark.parametrize(("heads", "config"), FORMS, ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["given", "own"])
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_stages_of_the_published_models(dtype, given, heads, config, cuda):
    """Shifted; the last program's share is smaller."""
    problem = make_problem(
        batch=8, windows=(2, 2), heads=heads, parts=heads // 4, dtype=dtype, device=cuda
    )
    check(problem, config, given)


@pytest.mark.parametrize("window", [(7, 8), (5, 10), (8, 8)], ids=str)
def test_v2_and_windows_that_are_not_square(window, cuda):
    check(make_problem(batch=3, windows=(2, 3), window=window, version=2, heads=8, device=cuda))


@pytest.mark.parametrize("heads", [6, 12])
def test_a_batch_that_fills_the_card(heads, cuda):
    check(make_problem(batch=64, windows=(4, 4), heads=heads, device=cuda, offset=20.0))
