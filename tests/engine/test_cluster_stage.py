"""Stages whose products run in clusters: which the plan takes, and whole models on the card."""

from __future__ import annotations

import copy
import dataclasses
import types

import pytest
import torch
from engine_cases import images_like
from hopper_plans import plan_of

from fastswin import Engine
from fastswin.engine import cluster_stage
from fastswin.engine.bind import bind
from fastswin.engine.cluster_stage import CLUSTER_STAGES, HOPPER_HEADS, LONG_WINDOW_ROWS
from fastswin.engine.forward import Forward
from fastswin.engine.plan import make_plan
from fastswin.engine.plans import Plans
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare
from fastswin.models import SwinTransformer
from fastswin.models.variants import find_variant
from fastswin.ops.attention_half.hopper_config import HopperHeadsConfig, hopper_heads_blocker
from fastswin.ops.cluster_linear.choice import (
    default_cluster_linear_config,
    default_post_norm_config,
)
from fastswin.ops.cluster_linear.config import ClusterLinearConfig, config_blocker

CPU = torch.device("cpu")
HALF = PRECISIONS["fp16"]
TINY, SMALL = "swin_tiny_patch4_window7_224", "swin_small_patch4_window7_224"
BASE, LARGE = "swin_base_patch4_window7_224", "swin_large_patch4_window7_224"
BASE_384, LARGE_384 = "swin_base_patch4_window12_384", "swin_large_patch4_window12_384"
V2_TINY_16 = "swinv2_tiny_window16_256"
V2_TINY_16_NORMS = {1: ("proj", "fc2"), 2: ("proj", "fc2"), 3: ("proj",)}


def clustered(plan) -> list[int]:
    return [s.stage for s in plan.stages if s.mlp == "clusters"]


@pytest.mark.parametrize(
    ("name", "stages", "post_norm"),
    [
        (TINY, [1, 2, 3], {}),
        (SMALL, [1, 2, 3], {}),
        (BASE, [0, 1, 2, 3], {}),
        (LARGE, [0, 1, 2, 3], {}),
        (BASE_384, [1, 2, 3], {}),
        (LARGE_384, [0, 1, 2, 3], {}),
        ("swinv2_tiny_window8_256", [2, 3], {2: ("proj", "fc2"), 3: ("proj",)}),
        (V2_TINY_16, [1, 2, 3], V2_TINY_16_NORMS),
        ("swinv2_base_window16_256", [1, 2, 3], {1: ("proj", "fc2"), 2: ("proj", "fc2")}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_stages_words_and_tiles_at_batch_1(name, stages, post_norm, hopper):
    plan = plan_of(name, hopper, cluster_stages=CLUSTER_STAGES, cluster_mlps={})
    assert plan == plan_of(name, hopper, cluster_mlps={})  # the engine's own
    assert clustered(plan) == stages
    version = find_variant(name).version
    merges = [s.stage for s in plan.stages if _in_clusters(s, "merge")]
    assert merges == [stage - 1 for stage in stages if stage]
    for stage in plan.stages:
        C, M = stage.channels, stage.map_size[0] * stage.map_size[1]
        if stage.stage in merges:
            assert stage.merge == "tiled"
            assert "statistics" in stage.reasons["merge"]
            assert config_blocker(stage.launch["merge"], (M + 3) // 4, 2 * C, 4 * C) is None
        layers = {k: v for k, v in stage.launch.items() if k not in ("merge", "attention")}
        if stage.stage not in stages:
            assert "clusters" not in (stage.qkv, stage.mlp)
            assert not any(_in_clusters(stage, layer) for layer in layers)
            assert (stage.norm2, stage.post_norm) == ("apart", ())
            assert "clusters" not in stage.reasons
            continue
        assert (stage.proj, stage.mlp) == ("fused", "clusters")
        assert stage.qkv == ("inside" if stage.attention == "fused" else "clusters")
        assert stage.norm2 == ("behind" if version == 1 else "apart")
        assert stage.few_rows
        assert stage.pdl
        inside = {"qkv"} if stage.qkv == "inside" else set()
        assert layers.keys() == {"qkv", "proj", "fc1", "fc2"} - inside
        assert stage.post_norm == post_norm.get(stage.stage, ())
        sizes = {"qkv": (3 * C, C), "proj": (C, C), "fc1": (4 * C, C), "fc2": (C, 4 * C)}
        for layer, tiles in layers.items():
            assert isinstance(tiles, ClusterLinearConfig)
            assert sizes[layer][0] % tiles.block_n == 0  # statistics are of equal parts
            behind = layer in stage.post_norm
            chosen = default_post_norm_config if behind else default_cluster_linear_config
            assert tiles == chosen(M, *sizes[layer])
            assert config_blocker(tiles, M, *sizes[layer], post_norm=behind) is None


def test_the_last_stage_of_long_windows(hopper):
    """144 rows of 1,536 channels; two images have more."""
    stage, more = (plan_of(LARGE_384, hopper, batch=batch).stages[3] for batch in (1, 2))
    assert (stage.channels, stage.map_size, stage.window_size) == (1536, (12, 12), (12, 12))
    assert (stage.qkv, stage.attention, stage.proj, stage.mlp) == (
        "clusters", "triton", "fused", "clusters"
    )  # fmt: skip
    assert stage.launch["qkv"] == ClusterLinearConfig(64, 128, 1, 6, 64, 3, 1)
    assert stage.launch["fc1"] == ClusterLinearConfig(128, 128, 1, 5)
    assert "clusters" not in (more.qkv, more.mlp)


def _in_clusters(stage, layer: str) -> bool:
    return isinstance(stage.launch.get(layer), ClusterLinearConfig)


@pytest.mark.parametrize("pdl", [None, True], ids=["by rows", "asked"])
def test_heads_have_weights_in_place_where_windows_are_whole(pdl, hopper):
    """Of a whole window's rows; other stages have no such kernel."""
    stages = plan_of(TINY, hopper, pdl=pdl).stages
    found = [isinstance(s.launch.get("attention"), HopperHeadsConfig) for s in stages]
    assert found == [False, True, True, True]
    assert [s.attention for s in stages] == ["block", "fused", "fused", "fused"]


@pytest.mark.parametrize(
    ("name", "stage", "batch"), [(BASE, 0, 1), (TINY, 1, 4), (BASE, 2, 3), (TINY, 3, 6)], ids=str
)
def test_heads_on_hopper_up_to_so_many_windows(name, stage, batch, hopper):
    """A batch more has attention apart, or in another form, or no clusters."""
    chosen = [plan_of(name, hopper, batch=b).stages[stage] for b in (batch, batch + 1)]
    assert isinstance(chosen[0].launch["attention"], HopperHeadsConfig)
    assert "windows" in chosen[0].reasons["attention"]
    assert not isinstance(chosen[1].launch.get("attention"), HopperHeadsConfig)


def test_every_stage_of_hoppers_heads_is_one_in_clusters():
    for (version, C), windows in HOPPER_HEADS.items():
        assert hopper_heads_blocker(C, C // 32, (7, 7), (14, 14)) is None
        assert 49 * (windows - 1) < CLUSTER_STAGES[version, C]


def test_every_stage_of_the_tables_has_tiles():
    assert all(rows > CLUSTER_STAGES[key] for key, rows in LONG_WINDOW_ROWS.items())
    for (version, C), rows in (*CLUSTER_STAGES.items(), *LONG_WINDOW_ROWS.items()):
        assert version in (1, 2)
        for N, K in ((3 * C, C), (C, C), (4 * C, C), (C, 4 * C)):
            for M in (16, 49, rows):
                tiles = default_cluster_linear_config(M, N, K)
                assert tiles is not None
                assert config_blocker(tiles, M, N, K) is None


@pytest.mark.parametrize(
    ("precision", "choices"),
    [("fp16", {"pdl": False}), ("fp32", {}), ("tf32", {}), ("fp32", {"pdl": True}),
     ("fp32", {"cluster_stages": CLUSTER_STAGES}), ("fp16", {"fused_attention": {}})],
    ids=["no pdl", "fp32", "tf32", "fp32 and pdl", "fp32 and a table", "decided halves"],
)  # fmt: skip
def test_nothing_in_clusters(precision, choices, hopper, monkeypatch):
    monkeypatch.setattr("fastswin.engine.stage_choice.choose_tf32_products", lambda *_, **__: None)
    monkeypatch.setattr("fastswin.engine.plan.embed_products", lambda *_: None)
    monkeypatch.setattr("fastswin.engine.stage_choice.splits_fp32", lambda *_: False)
    _check_nothing(plan_of(TINY, hopper, precision, **choices))


def _check_nothing(plan) -> None:
    assert clustered(plan) == []
    for stage in plan.stages:
        assert (stage.qkv == "clusters", stage.post_norm) == (False, ())
        assert not any(_in_clusters(stage, layer) for layer in stage.launch)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("pdl", [None, True], ids=["by rows", "asked"])
def test_nothing_on_other_cards(capability, pdl, hopper, monkeypatch):
    monkeypatch.setattr("fastswin.engine.plan.device_capability", lambda _: capability)
    _check_nothing(plan_of(TINY, hopper, pdl=pdl))


def test_nothing_on_a_slice_of_a_card(hopper, monkeypatch):
    """It may hold no cluster of 16 programs; whole blocks are its card's as well."""
    for processors, few in ((66, True), (114, False)):
        monkeypatch.setattr("fastswin.engine.plan.multiprocessor_count", lambda _, n=processors: n)
        plan = plan_of(TINY, hopper)
        assert (clustered(plan) == []) == few
        assert (plan.stages[0].attention != "block") == few
        if few:
            _check_nothing(plan)


def test_nothing_on_a_cpu():
    for pdl in (None, True):
        _check_nothing(plan_of(TINY, CPU, pdl=pdl))


@pytest.mark.parametrize("mix", ["auto", "scheme"])
@pytest.mark.parametrize("name", [TINY, LARGE])
def test_nothing_in_a_quantised_engine(name, mix, hopper, monkeypatch):
    """Its 8-bit layers are chosen of a plan that leaves every layer a kernel of its own."""
    monkeypatch.setattr("fastswin.engine.plans.quantize_plan", lambda plan, *_: plan)
    monkeypatch.setattr("fastswin.engine.plans.place_forms", lambda *_: None)
    config = find_variant(name)
    plans = Plans(hopper, "triton", None, None, mix)
    plans.take(types.SimpleNamespace(config=config, precision=HALF, weights=None), object())
    _check_nothing(plans._plan(1, config.image_size))


@pytest.mark.parametrize("missing", ["gluon", "tiles"])
def test_what_is_missing_leaves_the_stage_as_it_was_with_the_reason(missing, hopper, monkeypatch):
    plain = plan_of(TINY, hopper, cluster_stages={})
    if missing == "gluon":
        monkeypatch.setattr(cluster_stage, "gluon_blocker", lambda: "no Gluon")
    else:
        monkeypatch.setattr(cluster_stage, "default_cluster_linear_config", lambda *_: None)
    plan = plan_of(TINY, hopper)
    for stage, before in zip(plan.stages, plain.stages, strict=True):
        assert dataclasses.replace(stage, reasons=before.reasons) == before
    reason = plan.stages[2].reasons["clusters"]
    assert reason == "no Gluon" if missing == "gluon" else "proj: no tiles for 384" in reason


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("name", "stages"),
    [(TINY, [1, 2, 3]), (BASE, [0, 1, 2, 3]), (LARGE, [0, 2, 3]), (BASE_384, [1, 2, 3]),
     (V2_TINY_16, [1, 2, 3])],
    ids=["tiny", "base", "large", "base-384", "v2-tiny-16"],
)  # fmt: skip
@torch.no_grad()
def test_whole_models_on_the_card(name, stages, precision):
    """Two blocks a stage, in a graph and not, with clusters and without: against fp64."""
    device = torch.device("cuda")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("products in clusters need compute capability 9.0")
    torch.manual_seed(5)
    model = SwinTransformer(dataclasses.replace(find_variant(name), depths=(2, 2, 2, 2)))
    model = model.eval().to(device)
    for parameter in model.parameters():  # V2's norms begin at 0
        parameter.add_(0.05 * torch.randn_like(parameter))
    images = images_like(model, 1).to(device)
    chosen = PRECISIONS[precision]
    engine, config = Engine(model, precision), model.config
    assert clustered(engine.report(1).plan) == stages
    plan = make_plan(config, 1, config.image_size, device, chosen, cluster_stages={})
    weights = prepare(model, device, chosen.dtype)
    given = images.to(chosen.dtype)
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model).to(chosen.dtype)
    truth = exact(images.double())
    most = 2 * (eager(given).double() - truth).abs().max()
    without = Forward(config, weights, chosen).logits(given, bind(plan, weights, chosen))
    logits = engine(given).clone()
    for found in (logits, without):
        assert (found.double() - truth).abs().max() <= most
    plain = Engine(model, precision, cuda_graphs=False)
    for _ in range(3):
        assert torch.equal(engine(given), logits)
        assert torch.equal(plain(given), logits)
    stage_ends = (engine.features(given, "NHWC"), eager.forward_features(given))
    for found, near, expected in zip(
        *stage_ends, exact.forward_features(images.double()), strict=True
    ):
        assert (found.double() - expected).norm() <= 2 * (near.double() - expected).norm()
