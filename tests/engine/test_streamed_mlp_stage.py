"""Stages whose MLP half is one kernel past whose rows weights stream: plans and calls."""

from __future__ import annotations

import dataclasses

import pytest
from engine_gpu_cases import check_named_model
from hopper_plans import plan_of

from fastswin.engine import streamed_mlp_stage
from fastswin.engine.streamed_mlp_stage import STREAMED_MLPS
from fastswin.ops.streamed_mlp.config import StreamedMlpConfig, default_streamed_mlp_config

TINY, BASE = "swin_tiny_patch4_window7_224", "swin_base_patch4_window7_224"
LARGE, V2_BASE = "swin_large_patch4_window7_224", "swinv2_base_window8_256"
THREE, TWO, SHARED = StreamedMlpConfig(3), StreamedMlpConfig(2), StreamedMlpConfig(2, 2)


def tiles(plan) -> list[StreamedMlpConfig | None]:
    """Of each stage, None where its MLP is another kernel."""
    found = [s.launch.get("mlp") for s in plan.stages]
    return [t if isinstance(t, StreamedMlpConfig) else None for t in found]


@pytest.mark.parametrize(
    ("name", "batch", "expected"),
    [
        (TINY, 8, [None, SHARED, None, None]),
        (TINY, 16, [None, TWO, None, None]),
        (TINY, 32, [None, THREE, None, None]),
        (TINY, 64, [None, THREE, None, None]),
        (BASE, 8, [THREE, None, None, None]),  # 6,272 rows of 256 channels are faster by parts
        (BASE, 32, [None, TWO, None, None]),  # 100,352 of 128 by the resident kernel
        (LARGE, 8, [THREE, None, None, None]),
        (V2_BASE, 8, [TWO, None, None, None]),
        (V2_BASE, 32, [None, TWO, None, None]),
        (TINY, 1, [None] * 4),
    ],
    ids=str,
)  # fmt: skip
def test_tiles_by_batch(name, batch, expected, hopper):
    plan = plan_of(name, hopper, batch=batch)
    assert tiles(plan) == expected
    for stage, chosen in zip(plan.stages, expected, strict=True):
        if chosen is not None:
            assert stage.mlp == "fused"
            assert not {"fc1", "fc2"} & stage.launch.keys()
            assert f"{chosen.rows} stay while weights stream past" in stage.reasons["mlp"]


def test_the_table_has_tiles():
    for (_version, C), (fewest, most) in STREAMED_MLPS.items():
        assert fewest < most
        assert default_streamed_mlp_config(25_088, 4 * C, C, 132) is not None


@pytest.mark.parametrize(
    ("precision", "choices"),
    [("fp16", {"pdl": False}), ("fp32", {}), ("fp16", {"fused_attention": {}}),
     ("fp16", {"cluster_mlps": {}})],
    ids=["no pdl", "fp32", "decided halves", "decided MLPs"],
)  # fmt: skip
def test_nothing_of_it(precision, choices, hopper, monkeypatch):
    monkeypatch.setattr("fastswin.engine.plan.embed_products", lambda *_: None)
    monkeypatch.setattr("fastswin.engine.stage_choice.splits_fp32", lambda *_: False)
    assert tiles(plan_of(TINY, hopper, precision, batch=8, **choices)) == [None] * 4


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
def test_nothing_on_other_cards(capability, hopper, monkeypatch):
    monkeypatch.setattr("fastswin.engine.plan.device_capability", lambda _: capability)
    assert tiles(plan_of(TINY, hopper, batch=8)) == [None] * 4


@pytest.mark.parametrize("missing", ["gluon", "rows"])
def test_what_is_missing_leaves_the_stage_as_it_was_with_the_reason(missing, hopper, monkeypatch):
    plain = plan_of(LARGE, hopper, batch=8, cluster_mlps={}).stages[0]
    if missing == "gluon":
        monkeypatch.setattr(streamed_mlp_stage, "gluon_blocker", lambda: "no Gluon")
    else:
        monkeypatch.setattr(streamed_mlp_stage, "default_streamed_mlp_config", lambda *_: None)
    stage = plan_of(LARGE, hopper, batch=8).stages[0]
    assert dataclasses.replace(stage, reasons=plain.reasons) == plain
    expected = "no Gluon" if missing == "gluon" else "25088 rows would leave too much"
    assert expected in stage.reasons["streamed_mlp"]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(("name", "batch"), [(TINY, 8), (LARGE, 8), (BASE, 32)], ids=str)
def test_whole_models_on_the_card(name, batch, precision):
    check_named_model(name, batch, precision, lambda plan: any(tiles(plan)))
