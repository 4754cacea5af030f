"""The Hopper form by heads on a card: fp64, the same bits in every run, chains launched ahead."""

from __future__ import annotations

import pytest
import torch
from hopper_heads_cases import make_problem

from fastswin.ops.attention_half.hopper_launch import hopper_heads_fwd
from fastswin.testing.tolerance import assert_close_to_oracle

pytestmark = pytest.mark.gpu

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def check(problem):
    """Three runs of the same bits, the first where NaN has been in the results' memory."""
    dtype, stats = problem.made["x"].dtype, problem.statistics()
    poison = torch.full_like(problem.made["x"], float("nan"))
    del poison
    runs = [
        hopper_heads_fwd(*problem.packed(), pdl=pdl, norm_stats=stats)
        for pdl in (False, True, True)
    ]
    assert all(torch.equal(runs[0], other) for other in runs[1:])
    assert_close_to_oracle(
        runs[0], problem.reference(dtype), problem.reference(torch.float64), dtype
    )


@pytest.mark.parametrize(
    ("heads", "side"), [(4, 8), (6, 4), (8, 4), (12, 2), (16, 2), (24, 2)], ids=str
)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_stages_of_the_published_models(dtype, version, heads, side, cuda):
    """At 224 (windows of 7) and 256 pixels (8), shifted, statistics as products leave them."""
    window = (7, 7) if version == 1 else (8, 8)
    check(
        make_problem(
            windows=(side, side), window=window, shift=(3, 3), heads=heads, version=version,
            parts=heads // 2, dtype=dtype, device=cuda,
        )
    )  # fmt: skip


@pytest.mark.parametrize("window", [(7, 8), (5, 10), (4, 16), (6, 10)], ids=str)
@pytest.mark.parametrize("version", [1, 2])
def test_windows_that_are_not_square(version, window, cuda):
    check(make_problem(batch=3, windows=(2, 3), window=window, version=version, device=cuda))


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_large_offsets_do_not_cancel(dtype, cuda):
    check(make_problem(heads=12, parts=6, dtype=dtype, device=cuda, offset=100.0))


def test_a_batch_that_fills_the_card(cuda):
    """Swin-T's third stage at batch 64: 3,072 programs."""
    check(make_problem(batch=64, heads=12, parts=6, device=cuda))


def test_chain_in_a_graph_beside_another_stream(cuda):
    """Launched ahead behind a kernel that writes x: every replay the same bits."""
    problem = make_problem(heads=12, parts=6, device=cuda)
    x, packed, stats = problem.made["x"], problem.packed(), problem.statistics()
    want = hopper_heads_fwd(*packed, norm_stats=stats)
    source, busy = x.clone(), torch.randn(1 << 22, device=cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.fill_(float("nan"))
        x.copy_(source)
        out = hopper_heads_fwd(*packed, pdl=True, norm_stats=stats)
        again = hopper_heads_fwd(*packed, pdl=True, norm_stats=stats)
    other = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(other):
            busy.mul_(1.0001)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)
        assert torch.equal(again, want)
