"""The Hopper form of the whole half on a card: fp64, the same bits in every run, chains."""

from __future__ import annotations

import pytest
import torch
from hopper_whole_cases import make_whole

from fastswin.ops.attention_half.hopper_config import HopperWholeConfig
from fastswin.ops.attention_half.hopper_launch import hopper_whole_fwd
from fastswin.testing.tolerance import assert_close_to_oracle

pytestmark = pytest.mark.gpu

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def check(problem, config=None):
    """Three runs of the same bits: into memory that NaN has been in, and in place."""
    x = problem.made["x"]
    reference, oracle = problem.reference(x.dtype), problem.reference(torch.float64)
    out = torch.full_like(x, float("nan"))
    runs = [hopper_whole_fwd(*problem.packed(), out=out, config=config)]
    runs.append(hopper_whole_fwd(*problem.packed(), pdl=True, config=config))
    in_place = x.clone()
    packed = (in_place, *problem.packed()[1:])
    runs.append(hopper_whole_fwd(*packed, out=in_place, pdl=True, config=config))
    assert runs[0] is out
    assert all(torch.equal(runs[0], other) for other in runs[1:])
    assert_close_to_oracle(runs[0], reference, oracle, x.dtype)


#: Heads and (windows a program, groups); of four heads three groups find no room.
FORMS = [
    (heads, form)
    for heads in (3, 4)
    for form in ((1, 1), (3, 1), (2, 2), (5, 2), (3, 3), (7, 3), None)
    if heads == 3 or form is None or form[1] < 3
]


@pytest.mark.parametrize(("heads", "form"), FORMS, ids=str)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_first_stages_of_the_published_models(dtype, version, heads, form, cuda):
    """At 224 (windows of 7) and 256 pixels (8), shifted; the last program's share is smaller."""
    window = (7, 7) if version == 1 else (8, 8)
    config = None if form is None else HopperWholeConfig(*form)
    check(
        make_whole(
            batch=2, windows=(8, 8), window=window, heads=heads, version=version, dtype=dtype,
            device=cuda,
        ),
        config,
    )  # fmt: skip


@pytest.mark.parametrize("table", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [(7, 8), (5, 10), (4, 16), (6, 10)], ids=str)
@pytest.mark.parametrize("version", [1, 2])
def test_windows_that_are_not_square(version, window, table, cuda):
    problem = make_whole(
        batch=3, windows=(2, 3), window=window, version=version, table=table, device=cuda
    )
    check(problem, HopperWholeConfig(4, 2))


@pytest.mark.parametrize("shift", [(0, 0), (3, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("heads", [3, 4])
def test_shifts(heads, shift, cuda):
    check(make_whole(batch=3, windows=(3, 2), heads=heads, shift=shift, device=cuda))


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_large_offsets_do_not_cancel(dtype, cuda):
    check(make_whole(heads=4, dtype=dtype, device=cuda, offset=100.0))


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("version", [1, 2])
def test_a_batch_that_fills_the_card(version, groups, cuda):
    """Swin-T's first stage at batch 32: 2,048 windows, 16 a program."""
    problem = make_whole(batch=32, windows=(8, 8), version=version, device=cuda)
    check(problem, HopperWholeConfig(16, groups))


@pytest.mark.parametrize("version", [1, 2])
def test_chain_in_a_graph_beside_another_stream(version, cuda):
    """Blocks in place, launched ahead behind a kernel that writes x: every replay the same bits."""
    problem = make_whole(batch=8, windows=(8, 8), version=version, device=cuda)
    x, *packed = problem.packed()
    source, busy = x.clone(), torch.randn(1 << 22, device=cuda)
    first = hopper_whole_fwd(x, *packed)
    want = hopper_whole_fwd(first, *packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.fill_(float("nan"))
        x.copy_(source)
        for _ in range(2):
            hopper_whole_fwd(x, *packed, out=x, pdl=True)
    other = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(other):
            busy.mul_(1.0001)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(x, want)
