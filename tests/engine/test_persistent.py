"""Stages whose blocks are one kernel inside the engine's forward."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_cases import images_like, tiny

from fastswin.bench.call_cost import call_bytes, call_flops
from fastswin.engine.bind import bind
from fastswin.engine.calls import record_calls
from fastswin.engine.forward import Forward
from fastswin.engine.persistent import CANDIDATES
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare
from fastswin.models.variants import find_variant
from fastswin.ops.persistent_stage import launch
from fastswin.ops.persistent_stage.config import PersistentStageConfig

CPU = torch.device("cpu")
HALF = PRECISIONS["fp16"]
TILES = PersistentStageConfig(proj=(16, 32), fc1=(16, 64), fc2=(16, 32), splits=2)


def test_answers_as_the_model_does(monkeypatch):
    """The first stage is one call; merging reads a stream that lacks nothing."""
    monkeypatch.setattr(launch, "multiprocessor_count", lambda device: 16)
    model = tiny(1, depths=(2, 1), image_size=(16, 32), window_size=4)
    size = model.config.image_size
    plan = make_plan(
        model.config, 1, size, CPU, HALF, "triton", pdl=True, persistent={32: TILES}
    )  # fmt: skip
    words = [(s.qkv, s.attention, s.proj, s.mlp) for s in plan.stages]
    assert words[0] == ("persistent",) * 4
    assert "persistent" not in words[1]
    assert plan.stages[0].launch["persistent"] is TILES
    assert plan.stages[0].reasons["persistent stage"] == "32 rows: all blocks in one kernel"
    images = images_like(model, 1)
    with torch.no_grad():
        truth = model(images)
        eager = copy.deepcopy(model).half()(images.half()).float()
        weights = prepare(model, CPU, torch.float16)
        forward, bound = Forward(model.config, weights, HALF), bind(plan, weights, HALF)
        assert bind(plan, weights, HALF).persistent[0] is bound.persistent[0]
        logits = forward.logits(images.half(), bound).float()
        calls = record_calls(forward, bound, images.half(), execute=False)
    assert (logits - truth).abs().max() <= 1.5 * (eager - truth).abs().max()
    (stage,) = (call for call in calls if call.stage == 0 and call.layer != "merge")
    assert (stage.layer, stage.count) == ("stage", 1)
    products = 2 * 32 * 32 * (4 + 2 * 4) * 32
    assert call_flops(stage) == 2 * (products + 4 * 32 * 16 * 32)
    assert call_bytes(stage) > 2 * 12 * 32 * 32 * 2  # every block's matrices


@pytest.mark.parametrize(
    ("name", "batch", "pdl", "stages"),
    [
        ("swin_tiny_patch4_window7_224", 1, True, [2]),
        ("swin_base_patch4_window7_224", 1, True, [2]),
        ("swin_tiny_patch4_window7_224", 4, True, []),
        ("swin_tiny_patch4_window7_224", 1, False, []),
        ("swinv2_tiny_window8_256", 1, True, []),
    ],
    ids=["swin_t", "swin_b", "batch 4", "large plans", "v2"],
)
def test_stages_that_the_candidates_change(name, batch, pdl, stages):
    config = find_variant(name)
    plan = make_plan(
        config, batch, config.image_size, CPU, HALF, "triton", pdl=pdl, persistent=CANDIDATES
    )  # fmt: skip
    assert [s.stage for s in plan.stages if s.mlp == "persistent"] == stages


def test_what_the_kernel_cannot_hold_keeps_its_kernels_with_the_reason():
    config = find_variant("swin_large_patch4_window7_224")
    table = {384: PersistentStageConfig()}
    plan = make_plan(
        config, 1, config.image_size, CPU, HALF, "triton", pdl=True, persistent=table
    )  # fmt: skip
    assert plan.stages[1].mlp == "split-k"
    assert "attend has 192 pieces" in plan.stages[1].reasons["persistent stage"]
