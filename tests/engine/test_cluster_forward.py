"""The forward pass of stages in clusters: who reads whose statistics, with stand-ins on a CPU."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from unittest import mock

import pytest
import torch
from engine_cases import images_like, tiny

from fastswin.engine import calls, cluster_stage, operators
from fastswin.engine.bind import bind
from fastswin.engine.calls import record_calls
from fastswin.engine.check import check_finite
from fastswin.engine.forward import Forward
from fastswin.engine.fused_attention import FusedRange
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare
from fastswin.engine.warmup import kernel_calls
from fastswin.ops.attention_half.hopper_config import HopperHeadsConfig
from fastswin.ops.cluster_linear.config import ClusterLinearConfig, config_blocker
from fastswin.ops.linear.stats import write_stats_ref

CPU = torch.device("cpu")
HALF = PRECISIONS["fp16"]
#: Maps of 6x10 and 3x5 tokens in windows of 4: padded, and shifted in every second block.
ODD = {"image_size": (24, 40), "window_size": 4}
#: Maps of 7x14 and 4x7 tokens: the first is of whole windows, as Hopper's heads have them.
WHOLE = {"image_size": (28, 56), "window_size": 7}
WIDE = {"embed_dim": 128, "num_heads": (4, 8), "depths": (2, 1)}


class StandIn:
    """operators.py with the reference for what needs a Hopper; ``read`` counts statistics' readers.

    The reference computes statistics itself, so those given are compared with the true ones here.
    """

    def __init__(self, check: bool = True) -> None:
        self.check, self.read = check, Counter()

    def __getattr__(self, name: str):
        return getattr(operators, name)

    def linear(self, x, weight, bias=None, **kwargs):
        stats, config = kwargs.get("norm_stats"), kwargs.get("config")
        if stats is not None:
            self._true("qkv" if len(weight) == 3 * x.shape[-1] else "fc1", x, stats)
            sums = weight.double().sum(1)
            assert torch.allclose(kwargs["weight_sums"].double(), sums, rtol=1e-5, atol=1e-5)
        if isinstance(config, ClusterLinearConfig):
            N, K = weight.shape
            assert config_blocker(config, x.shape[:-1].numel(), N, K) is None
            assert kwargs.get("layer_norm_eps") is None or stats is not None
            kwargs["impl"] = "reference"
        return operators.linear(x, weight, bias, **kwargs)

    def packed_heads_attention(self, x, *args, norm_stats=None, **kwargs):
        """By the heads of other cards, which read statistics as well."""
        *args, eps, config = args
        if norm_stats is not None:
            self._true("heads", x, norm_stats)
            assert eps is not None
        config = None if isinstance(config, HopperHeadsConfig) else config
        return operators.packed_heads_attention(
            x, *args, eps, config, norm_stats=norm_stats, **kwargs
        )

    def linear_post_norm(self, x, weight, *args, **kwargs):
        N, K = weight.shape
        tiles = kwargs["config"]
        assert config_blocker(tiles, x.shape[:-1].numel(), N, K, post_norm=True) is None
        return operators.linear_post_norm(x, weight, *args, **{**kwargs, "impl": "reference"})

    def _true(self, reader: str, x: torch.Tensor, stats: torch.Tensor) -> None:
        self.read[reader] += 1
        if self.check:
            truth = torch.empty_like(stats)
            write_stats_ref(x, truth)
            close = torch.allclose(stats, truth, rtol=1e-3, atol=1e-4)
            assert close, f"{reader} reads statistics that are not x's"


def case(version: int, attention: str, forward=Forward, ops=None, **settings):
    """A model, a forward pass with stand-ins and its plan, all stages in clusters.

    ``attention`` is by heads, by Triton's kernel alone, or as the table of Hopper's heads has it.
    """
    model = tiny(version, **(WIDE | ODD | settings))
    size = model.config.image_size
    form = (FusedRange("heads"),)
    fused = {(version, 128): form, (version, 256): form} if attention == "heads" else {}
    own = cluster_stage.HOPPER_HEADS if attention == "table" else {}
    with mock.patch.object(cluster_stage, "HOPPER_HEADS", own):
        plan = make_plan(
            model.config, 1, size, CPU, HALF, "triton", pdl=True, fused_attention=fused,
            cluster_stages={(version, 128): 100, (version, 256): 100},
        )  # fmt: skip
    assert [s.mlp for s in plan.stages] == ["clusters"] * 2
    weights = prepare(model, CPU, torch.float16)
    ops = StandIn() if ops is None else ops
    return model, forward(model.config, weights, HALF, ops), bind(plan, weights, HALF)


@pytest.mark.parametrize("maps", [ODD, WHOLE], ids=["odd", "whole"])
@pytest.mark.parametrize("attention", ["heads", "triton"])
@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
@torch.no_grad()
def test_answers_as_the_model_does(version, attention, maps):
    """Five blocks: the first of a stage reads the embedding's statistics, or merging's."""
    model, forward, bound = case(version, attention, depths=(3, 2), **maps)
    layers = {"proj", "fc1", "fc2"} | ({"qkv"} if attention == "triton" else set())
    for stage in bound.plan.stages:
        tiles = {k: v for k, v in stage.launch.items() if k not in ("merge", "attention")}
        assert tiles.keys() == layers
        assert all(isinstance(found, ClusterLinearConfig) for found in tiles.values())
    normed = ("proj", "fc2") if version == 2 else ()  # which tiles for 128 channels have not
    assert [s.post_norm for s in bound.plan.stages] == [(), normed]
    first = bound.plan.stages[0].launch.get("attention")
    assert isinstance(first, HopperHeadsConfig) == (attention == "heads" and maps is WHOLE)
    images = images_like(model, 1)
    truth = copy.deepcopy(model).double()(images.double())
    eager = copy.deepcopy(model).half()(images.half()).double()
    logits = forward.logits(images.half(), bound).double()
    assert (logits - truth).abs().max() <= 1.5 * (eager - truth).abs().max()
    reader = "heads" if attention == "heads" else "qkv"
    assert forward.ops.read == ({reader: 5, "fc1": 5} if version == 1 else {})


@torch.no_grad()
def test_a_table_of_its_own_chooses_hoppers_heads():
    """Of V1's 128 channels, where other cards have attention apart; not of 256."""
    model, forward, bound = case(1, "table", depths=(3, 2), **WHOLE)
    assert [s.attention for s in bound.plan.stages] == ["fused", "triton"]
    assert [s.qkv for s in bound.plan.stages] == ["inside", "clusters"]
    assert "2 windows" in bound.plan.stages[0].reasons["attention"]
    images = images_like(model, 1)
    truth = copy.deepcopy(model).double()(images.double())
    eager = copy.deepcopy(model).half()(images.half()).double()
    logits = forward.logits(images.half(), bound).double()
    assert (logits - truth).abs().max() <= 1.5 * (eager - truth).abs().max()
    assert forward.ops.read == {"heads": 3, "qkv": 2, "fc1": 5}


def test_maps_of_padded_windows_have_no_hoppers_heads():
    _, _, bound = case(1, "table", **ODD)
    assert [s.attention for s in bound.plan.stages] == ["triton", "triton"]


class StaleForward(Forward):
    """The MLP half hands on attention's statistics."""

    def mlp_half(self, x, block, stage, offsets, stats=None):
        super().mlp_half(x, block, stage, offsets, stats)
        return stats


class MissingForward(Forward):
    """Nobody writes the statistics of proj and fc2."""

    def onto_stream(self, x, h, affine, tiles, *, pdl, statistics):
        super().onto_stream(x, h, affine, tiles, pdl=pdl, statistics=False)
        return self.room_for_stats(x, tiles) if statistics else None


class MergeForward(Forward):
    """Merging's statistics are those of its neighbours' rows, one row late."""

    def merge(self, x, index, stage, offset):
        y, left = super().merge(x, index, stage, offset)
        return y, dataclasses.replace(left, values=left.values.roll(1, 2).contiguous())


@pytest.mark.parametrize("attention", ["heads", "triton"])
@pytest.mark.parametrize("wrong", [StaleForward, MissingForward, MergeForward])
@torch.no_grad()
def test_wrong_statistics_are_noticed(wrong, attention):
    model, forward, bound = case(1, attention, wrong)
    with pytest.raises(AssertionError, match="statistics that are not x's"):
        forward.logits(images_like(model, 1).half(), bound)


@pytest.mark.parametrize("attention", ["heads", "triton"])
@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
@torch.no_grad()
def test_calls_are_noted_without_running_them(version, attention):
    model, forward, bound = case(version, attention)
    images = images_like(model, 1).half()
    plain = Forward(forward.config, forward.weights, HALF)
    quiet = record_calls(plain, bound, images, execute=False)
    names = ("linear", "linear_post_norm", "packed_heads_attention")
    in_place = {name: getattr(forward.ops, name) for name in names}
    with mock.patch.dict(calls.OPERATORS, in_place):
        real = record_calls(plain, bound, images)
    assert [(c.stage, c.layer, c.result.shape, c.count) for c in quiet] == [
        (c.stage, c.layer, c.result.shape, c.count) for c in real
    ]
    norms = Counter()
    for call in quiet:
        norms[call.stage] += call.count * (call.layer == "norm")
    if version == 1:  # behind products, by statistics from the embedding on
        assert norms == {None: 0, 0: 0, 1: 0}
    else:  # behind proj, fc2 and merging; those of the second stage are in the products' kernels
        assert norms == {None: 0, 0: 5, 1: 0}
    clusters = {c.layer for c in quiet if isinstance(c.kwargs.get("config"), ClusterLinearConfig)}
    also = ["qkv"] * (attention == "triton")
    assert clusters == {"proj", "fc1", "fc2", "merge", *also}


@pytest.mark.parametrize("attention", ["heads", "triton"])
@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
@torch.no_grad()
def test_warmup_makes_every_call_once(version, attention):
    """On scratch memory: statistics are not true there, shapes are."""
    stand_in = StandIn(check=False)
    model, forward, bound = case(version, attention, ops=stand_in)
    images = torch.empty(1, 3, *model.config.image_size, dtype=torch.float16)
    known: set = set()
    found = kernel_calls(Forward(forward.config, forward.weights, HALF), bound, images, known)
    assert len(found) == len(known)
    for call in found:
        function = getattr(stand_in, call.function.__name__)
        result = dataclasses.replace(call, function=function).run()
        assert result is None or result.shape == call.result.shape
    readers = {c.layer for c in found if c.kwargs.get("norm_stats") is not None}
    qkv = "attention" if attention == "heads" else "qkv"
    assert readers == ({qkv, "fc1"} if version == 1 else set())


@pytest.mark.parametrize("attention", ["heads", "triton"])
@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
@torch.no_grad()
def test_ranges_block_by_block(version, attention):
    """Half by half nothing is left behind, so attention computes its statistics itself."""
    model, forward, bound = case(version, attention)
    images = images_like(model, 1)
    ranges = check_finite(forward, images.half(), bound)
    places = [(r.stage, r.block, r.half) for r in ranges]
    blocks = [(0, 0), (0, 1), (1, 0)]
    halves = [(*block, half) for block in blocks for half in ("attention", "mlp")]
    assert places == [
        (0, 0, "patch embedding"), *halves[:4], (0, 2, "patch merging"), *halves[4:],
        (1, 1, "pool and head"),
    ]  # fmt: skip
    ends = [ranges[4].max_abs, ranges[-2].max_abs]
    for found, expected in zip(ends, model.forward_features(images), strict=True):
        assert found == pytest.approx(expected.abs().max().item(), rel=1e-2)
    model.layers[1].blocks[0].mlp.fc2.weight.mul_(1e6).clamp_(-6e4, 6e4)
    weights = prepare(model, CPU, torch.float16)
    wrong = Forward(forward.config, weights, HALF, StandIn())
    with pytest.raises(FloatingPointError, match=r"stage 1, block 0 \(mlp\)"):
        check_finite(wrong, images.half(), bind(bound.plan, weights, HALF))
