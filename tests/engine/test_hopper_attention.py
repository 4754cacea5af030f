"""Whole attention halves on Hopper in the engine: which stages take them, and answers."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from engine_cases import check_plan_in_fp16, tiny
from engine_gpu_cases import check_named_model
from hopper_plans import plan_of

from fastswin.engine import form_tables, hopper_attention, operators
from fastswin.engine.hopper_attention import HOPPER_WHOLE
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.ops.attention_half.hopper_config import HopperWholeConfig, hopper_whole_blocker

CPU = torch.device("cpu")
HALF = PRECISIONS["fp16"]
TINY, BASE = "swin_tiny_patch4_window7_224", "swin_base_patch4_window7_224"
V2_TINY, V2_BASE = "swinv2_tiny_window8_256", "swinv2_base_window8_256"


def whole(plan) -> list[bool]:
    return [isinstance(s.launch.get("attention"), HopperWholeConfig) for s in plan.stages]


@pytest.mark.parametrize("name", [TINY, BASE, V2_TINY, V2_BASE])
@pytest.mark.parametrize(("batch", "taken"), [(2, False), (4, True), (8, True), (64, True)])
def test_the_first_stage_of_many_windows(batch, taken, name, hopper):
    plan = plan_of(name, hopper, batch=batch)
    assert whole(plan) == [taken, False, False, False]
    if taken:
        stage = plan.stages[0]
        assert (stage.qkv, stage.attention, stage.proj, stage.mlp) == (
            "inside", "fused", "inside", "fused",
        )  # fmt: skip
        assert stage.pdl
        assert f"{64 * batch} windows" in stage.reasons["attention"]
        assert {"qkv", "proj"}.isdisjoint(stage.launch)


def test_every_stage_of_the_table_has_tiles():
    for (_version, C), (fewest, most) in HOPPER_WHOLE.items():
        assert fewest <= most
        assert hopper_whole_blocker(C, C // 32, (7, 7), (14, 14)) is None


@pytest.mark.parametrize(
    "choices", [{"pdl": False}, {"fused_attention": {}}, {"cluster_mlps": {}}], ids=str
)
def test_nothing_where_others_decide(choices, hopper):
    assert whole(plan_of(TINY, hopper, batch=8, **choices)) == [False] * 4


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)], ids=str)
def test_nothing_on_other_cards(capability, hopper, monkeypatch):
    monkeypatch.setattr("fastswin.engine.plan.device_capability", lambda _: capability)
    assert whole(plan_of(TINY, hopper, batch=8)) == [False] * 4


def test_a_reason_leaves_the_stage_as_it_was(hopper, monkeypatch):
    plain = plan_of(TINY, hopper, batch=8, cluster_mlps={}).stages[0]
    monkeypatch.setattr(hopper_attention, "hopper_whole_blocker", lambda *_: "no room")
    stage = plan_of(TINY, hopper, batch=8).stages[0]
    assert stage.reasons["whole"] == "no room"
    assert dataclasses.replace(stage, reasons=plain.reasons) == plain


class StandIn:
    """operators.py with other cards' kernel for the half, and the reference for the MLP."""

    def __init__(self) -> None:
        self.halves = 0

    def __getattr__(self, name: str):
        return getattr(operators, name)

    def mlp(self, *args, **kwargs):
        return operators.mlp(*args, **{**kwargs, "impl": "reference", "config": None})

    def packed_attention_half(self, *args, vectors=None, **kwargs):
        *args, config = args
        assert isinstance(config, HopperWholeConfig) == (vectors is not None)
        if vectors is not None:
            self.halves += 1
            qkv_bias, offset, proj_bias, norm_weight, norm_bias = (
                args[i] for i in (2, 3, 8, 9, 10)
            )
            assert offset is None
            assert torch.equal(vectors[:3].flatten(), qkv_bias)
            assert torch.equal(vectors[3], proj_bias)
            if norm_weight is not None:
                assert torch.equal(vectors[4:], torch.stack((norm_weight, norm_bias)))
            config = None
        return operators.packed_attention_half(*args, config, **kwargs)


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
def test_answers_as_the_model_does(version):
    model = tiny(
        version, embed_dim=96, num_heads=(3, 6), depths=(3, 1), image_size=(56, 112), window_size=7
    )
    with (
        mock.patch.object(form_tables, "why_no_clusters", return_value=None),
        mock.patch.object(form_tables, "MIN_MULTIPROCESSORS", 0),
        mock.patch.object(form_tables, "WHOLE_BLOCKS", {}),
        mock.patch.object(form_tables, "CLUSTER_STAGES", {}),
        mock.patch.object(form_tables, "HOPPER_WHOLE", {(version, 96): (1, 9)}),
        mock.patch("fastswin.engine.choice.FUSED_MLP_MIN_TOKENS", 1),
    ):
        plan = make_plan(model.config, 1, model.config.image_size, CPU, HALF, "triton")
    assert whole(plan) == [True, False]
    ops = StandIn()
    check_plan_in_fp16(model, plan, ops)
    assert ops.halves == 3


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", [TINY, BASE, V2_TINY, V2_BASE])
def test_whole_models_on_the_card(name, precision):
    check_named_model(name, 4, precision, lambda plan: whole(plan)[0])
