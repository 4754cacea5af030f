"""Stages whose MLP half is one kernel of clusters, with heads over windows: plans and answers."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from unittest import mock

import pytest
import torch
from engine_cases import images_like, tiny
from engine_gpu_cases import check_named_model
from hopper_plans import plan_of

from fastswin import ops
from fastswin.engine import calls, cluster_mlp_stage, form_tables, hopper_attention, operators
from fastswin.engine.bind import bind
from fastswin.engine.calls import record_calls
from fastswin.engine.cluster_mlp_stage import CLUSTER_MLPS
from fastswin.engine.forward import Forward
from fastswin.engine.hopper_attention import HOPPER_WINDOWS
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare
from fastswin.ops.attention_half.hopper_config import HopperWindowsConfig, hopper_windows_blocker
from fastswin.ops.cluster_linear.choice import default_cluster_linear_config
from fastswin.ops.cluster_linear.config import ClusterLinearConfig
from fastswin.ops.cluster_mlp.config import (
    TILE_ROWS,
    ClusterMlpConfig,
    config_blocker,
    default_cluster_mlp_config,
)
from fastswin.ops.linear.stats import write_stats_ref

CPU = torch.device("cpu")
HALF = PRECISIONS["fp16"]
TINY, SMALL = "swin_tiny_patch4_window7_224", "swin_small_patch4_window7_224"
BASE, V2_TINY = "swin_base_patch4_window7_224", "swinv2_tiny_window8_256"


def forms(plan) -> list[tuple[bool, bool]]:
    """By stage whether its MLP is in clusters, and its attention by windows."""
    return [
        (
            isinstance(s.launch.get("mlp"), ClusterMlpConfig),
            isinstance(s.launch.get("attention"), HopperWindowsConfig),
        )
        for s in plan.stages
    ]


@pytest.mark.parametrize("name", [TINY, SMALL])
def test_words_and_tiles_at_batch_8(name, hopper):
    plan = plan_of(name, hopper, batch=8)
    assert forms(plan) == [(False, False), (False, True), (True, True), (False, False)]
    stage = plan.stages[2]
    assert (stage.qkv, stage.attention, stage.proj, stage.mlp) == (
        "inside", "fused", "fused", "fused",
    )  # fmt: skip
    assert (stage.norm2, stage.pdl, stage.few_rows) == ("apart", True, True)
    assert stage.launch.keys() == {"attention", "proj", "mlp", "merge"}
    assert isinstance(stage.launch["proj"], ClusterLinearConfig)
    assert "32 windows" in stage.reasons["attention"]
    assert "1568 rows" in stage.reasons["mlp"]
    second = plan.stages[1]
    assert (second.mlp, second.norm2, second.proj) == ("fused", "apart", "fused")
    assert second.launch.keys() == {"attention", "proj", "mlp", "merge"}


@pytest.mark.parametrize("name", [TINY, SMALL])
def test_mergings_between_stages_that_are_launched_ahead(name, hopper):
    """And in front of a stage in clusters; of other batches' and of who decides himself: not."""
    stages = plan_of(name, hopper, batch=8).stages
    assert [s.merge for s in stages] == ["tiled", "tiled", "tiled", None]
    assert stages[3].mlp == "clusters"
    for stage, M in zip(stages, (6272, 1568, 392), strict=False):
        tiles = stage.launch["merge"]
        assert tiles == default_cluster_linear_config(M, 2 * stage.channels, 4 * stage.channels)
    apart = plan_of(name, hopper, batch=32), plan_of(name, hopper, batch=8, cluster_mlps={})
    assert [{s.merge for s in plan.stages[:2]} for plan in apart] == [{"triton"}] * 2
    assert [plan.stages[2].merge for plan in apart] == ["triton", "tiled"]


def test_the_stage_in_clusters_has_its_mlp_in_one_kernel(hopper):
    """Of a batch of 4, whose heads are a window's and whose merging leaves statistics."""
    plan = plan_of(TINY, hopper, batch=4)
    stage, before = plan.stages[2], plan_of(TINY, hopper, batch=4, cluster_mlps={}).stages[2]
    assert forms(plan)[2] == (True, False)
    assert before.mlp == "clusters"
    assert (stage.qkv, stage.attention, stage.proj) == (before.qkv, before.attention, before.proj)
    assert stage.launch == {
        **{k: v for k, v in before.launch.items() if k not in ("fc1", "fc2")},
        "mlp": default_cluster_mlp_config(784, 384),
    }
    assert plan.stages[1].merge == "tiled"


@pytest.mark.parametrize(("batch", "in_clusters"), [(3, False), (4, True), (8, True), (9, False)])
def test_rows_of_the_table(batch, in_clusters, hopper):
    """588 rows and 1,764 lie outside it."""
    assert forms(plan_of(TINY, hopper, batch=batch))[2][0] == in_clusters


def test_every_stage_of_the_tables_has_tiles():
    for (_version, C), (fewest, most) in CLUSTER_MLPS.items():
        for M in (fewest, most):
            tiles = default_cluster_mlp_config(M, C)
            assert tiles is not None
            assert config_blocker(tiles, M, C, 4 * C) is None
    for (_version, C), (fewest, most, tiles) in HOPPER_WINDOWS.items():
        assert fewest <= most
        assert hopper_windows_blocker(C, C // 32, (7, 7), (14, 14), tiles) is None


@pytest.mark.parametrize(
    ("precision", "choices"),
    [("fp16", {"pdl": False}), ("fp32", {}), ("fp16", {"fused_attention": {}}),
     ("fp16", {"cluster_mlps": {}})],
    ids=["no pdl", "fp32", "decided halves", "decided MLPs"],
)  # fmt: skip
def test_nothing_of_it(precision, choices, hopper, monkeypatch):
    monkeypatch.setattr("fastswin.engine.plan.embed_products", lambda *_: None)
    monkeypatch.setattr("fastswin.engine.stage_choice.splits_fp32", lambda *_: False)
    plan = plan_of(TINY, hopper, precision, batch=8, **choices)
    assert forms(plan) == [(False, False)] * 4


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
def test_nothing_on_other_cards(capability, hopper, monkeypatch):
    monkeypatch.setattr("fastswin.engine.plan.device_capability", lambda _: capability)
    assert forms(plan_of(TINY, hopper, batch=8)) == [(False, False)] * 4


@pytest.mark.parametrize("missing", ["gluon", "tiles", "windows"])
def test_what_is_missing_leaves_the_stage_as_it_was_with_the_reason(missing, hopper, monkeypatch):
    plain = plan_of(TINY, hopper, batch=8, cluster_mlps={}).stages[2]
    if missing == "gluon":
        monkeypatch.setattr(cluster_mlp_stage, "why_no_gluon", lambda _: "no Gluon")
    elif missing == "tiles":
        monkeypatch.setattr(cluster_mlp_stage, "default_cluster_mlp_config", lambda *_: None)
    else:
        monkeypatch.setattr(hopper_attention, "hopper_windows_blocker", lambda *_: "no windows")
    stage = plan_of(TINY, hopper, batch=8).stages[2]
    if missing == "windows":
        assert (stage.attention, stage.qkv, stage.mlp) == (plain.attention, plain.qkv, "fused")
        assert stage.reasons["windows"] == "no windows"
        return
    assert dataclasses.replace(stage, reasons=plain.reasons) == plain
    expected = "no Gluon" if missing == "gluon" else "no tiles for 1568 rows of 384 channels"
    assert stage.reasons["cluster_mlp"] == expected


class StandIn:
    """operators.py with the reference for what needs a Hopper; ``read`` counts statistics' readers.

    The reference computes statistics itself, so those given are compared with the true ones here.
    """

    def __init__(self, blocks=()) -> None:
        self.read: Counter = Counter()
        self.blocks = blocks

    def __getattr__(self, name: str):
        return getattr(operators, name)

    def linear(self, x, weight, bias=None, **kwargs):
        if isinstance(kwargs.get("config"), ClusterLinearConfig):
            kwargs["impl"] = "reference"
        return operators.linear(x, weight, bias, **kwargs)

    def mlp(self, *args, **kwargs):
        return operators.mlp(*args, **{**kwargs, "impl": "reference", "config": None})

    def packed_heads_attention(self, x, *args, norm_stats=None, **kwargs):
        *args, config = args
        self._true("heads", x, norm_stats)
        config = None if isinstance(config, HopperWindowsConfig) else config
        return operators.packed_heads_attention(x, *args, config, norm_stats=norm_stats, **kwargs)

    def packed_mlp(self, x, weights, eps, config, *, out, pdl=False, stats_out=None):
        """Of the block whose packed weights these are."""
        C = x.shape[-1]
        assert config_blocker(config, x.numel() // C, C, 4 * C) is None
        block = next(b for b in self.blocks if b.mlps.get(config.programs) is weights)
        norm = block.norm2
        ops.mlp(
            x, block.fc1.weight, block.fc1.bias, block.fc2.weight, block.fc2.bias,
            norm_weight=None if norm is None else norm.weight,
            norm_bias=None if norm is None else norm.bias, eps=eps, out=out, impl="reference",
        )  # fmt: skip
        if stats_out is not None:
            assert stats_out.shape == (2, C // TILE_ROWS, x.numel() // C)
            write_stats_ref(out, stats_out)
        return out

    def _true(self, reader: str, x: torch.Tensor, stats: torch.Tensor | None) -> None:
        self.read[reader, stats is not None] += 1
        if stats is not None:
            truth = torch.empty_like(stats)
            write_stats_ref(x, truth)
            close = torch.allclose(stats, truth, rtol=1e-3, atol=1e-4)
            assert close, f"{reader} reads statistics that are not x's"


def case(version: int, windows: bool, forward=Forward):
    """A model of 128 and 256 channels, its forward pass with stand-ins and its plan."""
    model = tiny(
        version, embed_dim=128, num_heads=(4, 8), depths=(2, 3), image_size=(56, 112), window_size=7
    )
    size, tiles = model.config.image_size, ClusterMlpConfig(64, 4)
    tables = {(version, 128): (1, 99, None), (version, 256): (1, 99, None)} if windows else {}
    with (
        mock.patch.object(form_tables, "why_no_clusters", return_value=None),
        mock.patch.object(form_tables, "MIN_MULTIPROCESSORS", 0),
        mock.patch.object(form_tables, "FUSED_CAPABILITIES", ()),
        mock.patch.object(form_tables, "WHOLE_BLOCKS", {}),
        mock.patch.object(form_tables, "CLUSTER_STAGES", {}),
        mock.patch.object(form_tables, "CLUSTER_MLPS", {(version, 256): (1, 999)}),
        mock.patch.object(form_tables, "HOPPER_WINDOWS", tables),
        mock.patch.object(cluster_mlp_stage, "default_cluster_mlp_config", return_value=tiles),
        mock.patch("fastswin.engine.choice.FUSED_MLP_MIN_TOKENS", 1),
    ):
        plan = make_plan(model.config, 1, size, CPU, HALF, "triton")
    weights = prepare(model, CPU, torch.float16)
    stand_in = StandIn([block for stage in weights.stages for block in stage])
    return model, forward(model.config, weights, HALF, stand_in), bind(plan, weights, HALF)


@pytest.mark.parametrize("windows", [True, False], ids=["windows", "apart"])
@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
@torch.no_grad()
def test_answers_as_the_model_does(version, windows):
    """Statistics: the MLP leaves them to the next block's heads."""
    model, forward, bound = case(version, windows)
    assert forms(bound.plan)[1] == (True, windows)
    assert bound.plan.stages[1].proj == "fused"
    images = images_like(model, 1)
    truth = copy.deepcopy(model).double()(images.double())
    eager = copy.deepcopy(model).half()(images.half()).double()
    logits = forward.logits(images.half(), bound).double()
    assert (logits - truth).abs().max() <= 1.5 * (eager - truth).abs().max()
    read = {}
    if windows:  # stage 0's MLP leaves none; the merging in front of stage 1 does
        assert forms(bound.plan)[0] == (False, True)
        given = 3 if version == 1 else 0
        read = {("heads", False): 5 - given} | ({("heads", True): given} if given else {})
    assert forward.ops.read == read


class StaleForward(Forward):
    """The MLP half's statistics are one row late."""

    def mlp_in_clusters(self, x, block, stage, tiles):
        left = super().mlp_in_clusters(x, block, stage, tiles)
        return dataclasses.replace(left, values=left.values.roll(1, 2).contiguous())


@torch.no_grad()
def test_wrong_statistics_are_noticed():
    model, forward, bound = case(1, True, StaleForward)
    with pytest.raises(AssertionError, match="statistics that are not x's"):
        forward.logits(images_like(model, 1).half(), bound)


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
@torch.no_grad()
def test_calls_are_noted_without_running_them(version):
    model, forward, bound = case(version, True)
    images = images_like(model, 1).half()
    plain = Forward(forward.config, forward.weights, HALF)
    quiet = record_calls(plain, bound, images, execute=False)
    names = ("linear", "mlp", "packed_heads_attention", "packed_mlp")
    with mock.patch.dict(calls.OPERATORS, {name: getattr(forward.ops, name) for name in names}):
        real = record_calls(plain, bound, images)
    assert [(c.stage, c.layer, c.result.shape, c.count) for c in quiet] == [
        (c.stage, c.layer, c.result.shape, c.count) for c in real
    ]
    found = [c for c in quiet if c.function is operators.packed_mlp]
    assert [(c.stage, c.layer) for c in found] == [(1, "mlp")]
    assert sum(c.count for c in found) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(("name", "batch"), [(TINY, 4), (TINY, 8)], ids=str)
def test_whole_models_on_the_card(name, batch, precision):
    check_named_model(name, batch, precision, lambda plan: any(mlp for mlp, _ in forms(plan)))
