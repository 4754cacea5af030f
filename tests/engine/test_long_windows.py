"""Attention of few long windows in the engine: which stages take it, what goes with it, answers."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from engine_cases import check_plan_in_fp16, tiny
from engine_gpu_cases import check_named_model
from hopper_plans import plan_of

from fastswin.engine import form_tables, hopper_attention, operators
from fastswin.engine.plan import HEAD_TILES, make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.ops.window_attention.hopper_config import HopperAttentionConfig

CPU = torch.device("cpu")
HALF = PRECISIONS["fp16"]
TINY, BASE = "swin_tiny_patch4_window7_224", "swin_base_patch4_window7_224"
BASE_384, LARGE_384 = "swin_base_patch4_window12_384", "swin_large_patch4_window12_384"


def long(plan) -> list[bool]:
    return [isinstance(s.launch.get("attention"), HopperAttentionConfig) for s in plan.stages]


@pytest.mark.parametrize(
    ("name", "batch", "taken"),
    [
        (BASE_384, 1, [False, True, True, True]),
        (BASE_384, 2, [False, False, True, True]),
        (BASE_384, 8, [False, False, False, False]),
        (LARGE_384, 1, [False, False, True, True]),
        (BASE, 1, [False] * 4),
        ("swinv2_base_window16_256", 1, [False] * 4),
    ],
)
def test_stages_of_few_pairs(name, batch, taken, hopper):
    plan = plan_of(name, hopper, batch=batch)
    assert long(plan) == taken
    for stage, is_long in zip(plan.stages, taken, strict=True):
        assert ("three groups of queries" in stage.reasons.get("attention", "")) == is_long
        assert not is_long or stage.attention == "triton"


@pytest.mark.parametrize(
    "choices", [{"pdl": False}, {"fused_attention": {}}, {"cluster_mlps": {}}], ids=str
)
def test_nothing_where_others_decide(choices, hopper):
    assert long(plan_of(BASE_384, hopper, **choices)) == [False] * 4


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)], ids=str)
def test_nothing_on_other_cards(capability, hopper, monkeypatch):
    monkeypatch.setattr("fastswin.engine.plan.device_capability", lambda _: capability)
    assert long(plan_of(BASE_384, hopper)) == [False] * 4


def test_windows_that_the_kernel_refuses_stay_as_they_were(hopper, monkeypatch):
    monkeypatch.setattr(hopper_attention, "hopper_attention_blocker", lambda *_: "padded")
    assert long(plan_of(BASE_384, hopper)) == [False] * 4


def test_rows_of_long_windows_in_clusters(hopper):
    """All stages in windows of 144 at batch 1; in windows of 49 of 768 channels up to 400 rows."""
    stages = plan_of(LARGE_384, hopper).stages
    assert [stage.mlp for stage in stages] == ["clusters"] * 4
    third = (
        plan_of(LARGE_384, hopper, batch=2).stages[2],
        plan_of(LARGE_384, hopper, batch=3).stages[2],
    )
    assert [stage.mlp == "clusters" for stage in third] == [True, False]
    third = (
        plan_of(BASE_384, hopper, batch=2).stages[2],
        plan_of(BASE_384, hopper, batch=3).stages[2],
    )
    assert [stage.mlp == "clusters" for stage in third] == [True, False]
    assert plan_of(TINY, hopper, batch=8).stages[3].mlp == "clusters"
    assert plan_of(TINY, hopper, batch=9).stages[3].mlp == "library"


@pytest.mark.parametrize(
    ("name", "batch", "ahead"),
    [
        (BASE_384, 1, True),
        (LARGE_384, 1, True),
        (LARGE_384, 2, False),
        (BASE, 1, True),
        (BASE, 8, False),
    ],
)
def test_pool_and_head_follow_the_last_stage(name, batch, ahead, hopper):
    plan = plan_of(name, hopper, batch=batch)
    assert plan.ends_ahead == ahead
    assert plan.head == ("tiled" if ahead else "library")
    measured = ahead and name != LARGE_384  # up to 1,024 features; the operator chooses for 1,536
    assert plan.head_tiles == (HEAD_TILES if measured else None)
    assert plan.ends_ahead == plan.stages[-1].pdl


def test_pool_and_head_of_many_images_stay_behind(hopper):
    """17 rows would be two tiles of the head."""
    from fastswin.engine.plan import _few_images

    last = dataclasses.replace(plan_of(BASE, hopper).stages[-1], pdl=True)
    assert _few_images(last, 16)
    assert not _few_images(last, 17)


class StandIn:
    """operators.py with the reference for attention of long windows."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str):
        return getattr(operators, name)

    def packed_window_attention(self, *args, **kwargs):
        *args, config = args
        if isinstance(config, HopperAttentionConfig):
            self.calls += 1
            config = None
        return operators.packed_window_attention(*args, config, **kwargs)


def test_answers_as_the_model_does():
    model = tiny(
        1, embed_dim=64, num_heads=(2, 4), depths=(2, 1), image_size=(96, 96), window_size=12
    )
    with (
        mock.patch.object(form_tables, "why_no_clusters", return_value=None),
        mock.patch.object(form_tables, "MIN_MULTIPROCESSORS", 0),
        mock.patch.object(form_tables, "CLUSTER_STAGES", {}),
        mock.patch.object(form_tables, "LONG_WINDOW_PAIRS", 8),
    ):
        plan = make_plan(model.config, 1, model.config.image_size, CPU, HALF, "triton")
    assert long(plan) == [True, True]
    ops = StandIn()
    check_plan_in_fp16(model, plan, ops)
    assert ops.calls == 3


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(("name", "batch"), [(BASE_384, 1), (BASE_384, 2), (LARGE_384, 1)])
def test_whole_models_on_the_card(name, batch, precision):
    check_named_model(name, batch, precision, lambda plan: long(plan)[2])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_two_images_of_the_largest_model_on_the_card(precision):
    """1,152 rows of 768 channels in clusters, whose tiles the model of measurements chooses."""
    check_named_model(LARGE_384, 2, precision, lambda plan: plan.stages[2].mlp == "clusters")
