"""Chains of products in clusters on a card: launched ahead, in graphs, beside other streams."""

from __future__ import annotations

import functools

import pytest
import torch
from card_streams import check_side_by_side
from cluster_linear_cases import (
    HALF,
    make_post_norm,
    make_product,
    room_for_stats,
    run_on_card,
    run_post_norm,
    with_ring,
)

from fastswin.ops.cluster_linear.choice import default_cluster_linear_config

pytestmark = pytest.mark.gpu


class Chain:
    """Six times fc1 with a norm behind and fc2 onto the stream, which leaves the next statistics.

    A kernel that is early reads a stream, statistics or hidden rows that are not there yet, or
    writes over what another still reads: all lie in buffers that every block shares.
    """

    def __init__(self, M, C, tiles, device, dtype=torch.float16, seed=0):
        """``tiles`` of fc1 and fc2, None takes the operator's choice."""
        self.fc1 = default_cluster_linear_config(M, 4 * C, C)
        self.fc2 = default_cluster_linear_config(M, C, 4 * C)
        if tiles is not None:
            self.fc1, self.fc2 = with_ring(C, *tiles[0]), with_ring(4 * C, *tiles[1])
        self.blocks = []
        for number in range(seed, seed + 12, 2):
            made = {"dtype": dtype, "device": device}
            grow = make_product(M, 4 * C, C, parts=1, gelu=True, seed=number, **made)
            shrink = make_product(M, C, 4 * C, seed=number + 1, **made)
            self.blocks.append((grow, shrink))
        self.first = self.blocks[0][0]["x"]
        self.stats = room_for_stats(M, C, self.fc2, device)
        self.hidden = self.first.new_empty(M, 4 * C)
        torch.cuda.synchronize()  # weights are there before the chain begins

    def run(self, pdl):
        stream, before = self.first.clone(), self.blocks[0][0]["norm_stats"]
        for grow, shrink in self.blocks:
            given = grow | {"x": stream, "norm_stats": before}
            run_on_card(given, self.fc1, out=self.hidden, pdl=pdl)
            given = shrink | {"x": self.hidden, "residual": stream}
            run_on_card(given, self.fc2, out=stream, stats_out=self.stats, pdl=pdl)
            before = self.stats
        return stream


#: Rows, channels and tiles: those of stages, of a batch, narrow ones cut along K, those
#: that share copies, all at once or in rings that each fills again for itself.
CHAINS = {
    "stage 3": (196, 384, None), "stage 4": (49, 768, None), "at 384": (576, 512, None),
    "batch": (1568, 256, None),
    "narrow": (196, 384, ((16, 128, 2, 64), (32, 64, 4, 128))),
    "shares": (196, 768, ((64, 128, 1, 64, 2, 4), (64, 128, 4, 64, 2, 1))),
    "ring": (196, 512, ((64, 64, 1, 64, 2, 2), (64, 128, 1, 64, 2, 2))),
}  # fmt: skip


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("shape", CHAINS.values(), ids=CHAINS)
def test_a_chain_of_dependent_launches_is_one_of_plain_ones(shape, dtype, cuda):
    chain = Chain(*shape, cuda, dtype)
    plain = chain.run(pdl=False)
    assert plain.isfinite().all()
    assert all(torch.equal(chain.run(pdl=True), plain) for _ in range(5))


@pytest.mark.parametrize("shape", CHAINS.values(), ids=CHAINS)
def test_a_chain_in_a_graph(shape, cuda):
    chain = Chain(*shape, cuda)
    plain = chain.run(pdl=False)
    chain.run(pdl=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain.run(pdl=True)
    for _ in range(3):
        for filled in (found, chain.stats, chain.hidden):
            filled.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, plain)


@pytest.mark.parametrize(
    "names", [("stage 3", "stage 4"), ("stage 3", "narrow"), ("shares", "ring")], ids=str
)
def test_two_streams_side_by_side(names, cuda):
    chains = [Chain(*CHAINS[name], cuda, seed=100 * i) for i, name in enumerate(names)]
    plain = [chain.run(pdl=False) for chain in chains]
    check_side_by_side([functools.partial(chain.run, pdl=True) for chain in chains], plain)


@pytest.mark.parametrize("name", ["stage 3", "narrow", "shares"])
def test_a_graph_beside_another_stream(name, cuda):
    """Replays on one stream, launches ahead on another: programs of both share the card."""
    chain, beside = Chain(*CHAINS[name], cuda), Chain(*CHAINS["stage 4"], cuda, seed=100)
    expected = [each.run(pdl=False) for each in (chain, beside)]
    for each in (chain, beside):
        each.run(pdl=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain.run(pdl=True)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    replayed, launched = [], []
    for _ in range(5):
        for filled in (found, chain.stats, chain.hidden):
            filled.fill_(float("nan"))
        graph.replay()
        with torch.cuda.stream(other):
            launched.append(beside.run(pdl=True))
        replayed.append(found.clone())
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected[0]) for result in replayed)
    assert all(torch.equal(result, expected[1]) for result in launched)


@pytest.mark.parametrize(("M", "C"), [(576, 192), (196, 384), (64, 768)])
def test_a_chain_of_post_norms(M, C, cuda):
    """proj onto the stream, whose result the next one multiplies; plain, ahead, in a graph."""
    blocks = [make_post_norm(M, C, C, device=cuda, seed=seed) for seed in range(6)]
    for made in blocks:
        made["norm_weight"] *= 0.5
    torch.cuda.synchronize()  # weights are there before the chain begins

    def chain(pdl):
        x, stream = blocks[0]["x"].clone(), blocks[0]["residual"].clone()
        for made in blocks:
            given = made | {"x": x, "residual": stream}
            x = run_post_norm(given, torch.empty_like(stream), pdl)
            run_post_norm(given | {"x": x}, stream, pdl)
        return stream

    plain = chain(False)
    assert plain.isfinite().all()
    assert all(torch.equal(chain(True), plain) for _ in range(5))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(True)
    for _ in range(3):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, plain)
