"""The cluster kernel on a card: values against fp64, the same bits in every run and every way."""

from __future__ import annotations

import functools

import pytest
import torch
from card_streams import check_side_by_side
from swin_block_cases import in_double, make_block

from fastswin._triton.cluster import clusters_at_once
from fastswin.ops.swin_block import launch, swin_block
from fastswin.ops.swin_block.packing import pack_block
from fastswin.ops.window_attention.packing import pack_bias, pack_head_scale
from fastswin.testing.tolerance import assert_close_to_oracle

pytestmark = pytest.mark.gpu

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def run(made, **changed):
    return swin_block(**made | changed, impl="triton")


def check(runs, made):
    eager = swin_block(**made, impl="reference")
    oracle = swin_block(**in_double(made), impl="reference")
    assert_close_to_oracle(runs[0], eager, oracle, made["x"].dtype)
    assert all(torch.equal(runs[0], other) for other in runs[1:])


def check_every_way(made):
    """Three runs, the first into NaN and the last in place."""
    x = made["x"].clone()
    out = torch.full_like(x, float("nan"))
    assert run(made, out=out) is out
    runs = [out, run(made), run(made, x=x, out=x)]
    assert runs[2] is x
    check(runs, made)


@pytest.mark.parametrize("shift", [(0, 0), (3, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("window", [(7, 7), (8, 8)], ids=str)
@pytest.mark.parametrize("heads", [2, 3, 4, 6])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_block(dtype, version, heads, window, shift, cuda):
    """Three images where the shift is along one axis."""
    made = make_block(
        heads=heads, version=version, batch=3 if shift == (3, 0) else 1, windows=(3, 2),
        window=window, shift=shift, dtype=dtype, device=cuda,
    )  # fmt: skip
    check_every_way(made)


@pytest.mark.parametrize("window", [(7, 8), (5, 10), (6, 10), (4, 16)], ids=str)
@pytest.mark.parametrize("version", [1, 2])
def test_windows_that_are_not_square(version, window, cuda):
    made = make_block(
        heads=3, version=version, windows=(2, 3), window=window, shift=(2, 3), device=cuda
    )
    check_every_way(made)


@pytest.mark.parametrize("heads", [3, 6])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_large_offsets_do_not_cancel(dtype, version, heads, cuda):
    made = make_block(
        heads=heads, version=version, windows=(2, 2), dtype=dtype, device=cuda, offset=100.0
    )
    check_every_way(made)


@pytest.mark.parametrize("version", [1, 2])
def test_more_clusters_than_a_card_holds(version, cuda):
    """Swin-T's first stage at batch 64."""
    made = make_block(version=version, heads=3, batch=64, windows=(8, 8), device=cuda)
    check_every_way(made)


def test_layers_without_biases(cuda):
    made = make_block(heads=3, windows=(2, 2), device=cuda)
    made |= {name: None for name in ("qkv_bias", "proj_bias", "fc1_bias", "fc2_bias", "bias")}
    check_every_way(made)


def test_no_images_give_no_images(cuda):
    made = make_block(heads=3, device=cuda)
    assert run(made, x=made["x"][:0]).shape == (0, 14, 7, 96)


def prepared(made):
    """Packed weights and the rest of a launch, without the stream."""
    layers = [(made[f"{n}_weight"], made[f"{n}_bias"]) for n in ("qkv", "proj", "fc1", "fc2")]
    norms = []
    if "logit_scale" in made:
        norms = [(made[f"{n}_weight"], made[f"{n}_bias"]) for n in ("norm1", "norm2")]
    heads, window, shift = made["num_heads"], made["window_size"], made["shift_size"]
    table = pack_bias(made["bias"], heads, window, shift, made["x"].device)
    head_scale = pack_head_scale(made.get("logit_scale"))
    return pack_block(*layers, *norms), table, head_scale, 32**-0.5, window, shift, 1e-5


def chain_of(version, heads, device, batch=1):
    """A stream and what six blocks of it need, shifted in turn."""
    blocks = [
        make_block(
            heads=heads, version=version, batch=batch, windows=(4, 4), device=device, seed=number,
            shift=(3, 3) if number % 2 else (0, 0),
        )
        for number in range(6)
    ]  # fmt: skip
    found = blocks[0]["x"], [prepared(made) for made in blocks]
    torch.cuda.synchronize()  # weights are there before the chain begins
    return found


def run_chain(x, blocks, pdl):
    """Out of place, then in place: each block reads what the one before has written."""
    x = launch.swin_block_fwd(x, *blocks[0], torch.full_like(x, float("nan")), pdl)
    for block in blocks[1:]:
        launch.swin_block_fwd(x, *block, x, pdl)
    return x


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("heads", [2, 3, 4, 6])
@pytest.mark.parametrize("version", [1, 2])
def test_a_chain_of_dependent_launches_is_one_of_plain_ones(version, heads, batch, cuda):
    x, blocks = chain_of(version, heads, cuda, batch)
    plain = run_chain(x, blocks, pdl=False)
    assert plain.isfinite().all()
    assert all(torch.equal(run_chain(x, blocks, pdl=True), plain) for _ in range(5))


@pytest.mark.parametrize("version", [1, 2])
def test_a_chain_in_a_graph(version, cuda):
    x, blocks = chain_of(version, 3, cuda)
    plain = run_chain(x, blocks, pdl=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run_chain(x, blocks, pdl=True)
    for _ in range(3):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, plain)


@pytest.mark.parametrize("version", [1, 2])
def test_two_streams_side_by_side(version, cuda):
    chains = [chain_of(version, heads, cuda, batch=8) for heads in (3, 6)]
    plain = [run_chain(*chain, pdl=False) for chain in chains]
    ahead = [functools.partial(run_chain, *chain, pdl=True) for chain in chains]
    check_side_by_side(ahead, plain)


@pytest.mark.parametrize("window", [(7, 7), (8, 8)], ids=str)
@pytest.mark.parametrize("heads", [2, 3, 4, 6])
@pytest.mark.parametrize("version", [1, 2])
def test_clusters_that_a_card_holds_at_once(version, heads, window, cuda, monkeypatch):
    found = []

    def ask(kernel, clusters, size, tail, *arguments, **constants):
        found.append(clusters_at_once(kernel, size, tail, *arguments, **constants))

    monkeypatch.setattr(launch, "launch_clusters", ask)
    run(make_block(heads=heads, version=version, window=window, device=cuda))
    assert len(found) == 1
    assert found[0] > 0
