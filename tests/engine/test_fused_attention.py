"""The attention half as one kernel inside the engine's forward: both forms, V1 and V2."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter

import pytest
import torch
from engine_cases import images_like, tiny

from fastswin.engine.bind import bind
from fastswin.engine.calls import record_calls
from fastswin.engine.forward import Forward
from fastswin.engine.fused_attention import FUSED_ATTENTION, FusedRange
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare
from fastswin.models import create_model
from fastswin.models.variants import find_variant
from fastswin.ops.attention_half.config import (
    HeadsConfig,
    WholeWindowConfig,
    attention_half_blocker,
)
from fastswin.ops.linear.config import OneShotConfig

CPU = torch.device("cpu")
HALF = PRECISIONS["fp16"]
#: Maps of 6x10 and 3x5 tokens in windows of 4: padded, and shifted in the second block.
SMALL = {"depths": (2, 2), "image_size": (24, 40), "window_size": 4}


def forced(version: int, *forms: FusedRange) -> dict:
    """A table that gives the stages of the tiny model (32 and 64 channels) these forms."""
    return {(version, 32 << i): (form,) for i, form in enumerate(forms)}


@pytest.mark.parametrize(
    ("version", "forms"),
    [
        (1, (FusedRange("heads"), FusedRange("window"))),
        (
            2,
            (
                FusedRange("window", config=WholeWindowConfig(num_stages=2, tma=True)),
                FusedRange("heads", config=HeadsConfig(32)),
            ),
        ),
    ],
    ids=["v1", "v2"],
)
def test_answers_as_the_model_does(version, forms):
    """After library products that leave their biases pending, too: proj of the first form does."""
    model = tiny(version, **SMALL)
    config = model.config
    plan = make_plan(
        config, 1, config.image_size, CPU, HALF, "triton",
        fused_attention=forced(version, *forms),
    )  # fmt: skip
    words = [(s.attention, s.qkv, s.proj) for s in plan.stages]
    assert words == [
        ("fused", "inside", "inside" if form.form == "window" else "library") for form in forms
    ]
    images = images_like(model, 1)
    with torch.no_grad():
        truth = model(images)
        eager = copy.deepcopy(model).half()(images.half()).float()
        weights = prepare(model, CPU, torch.float16)
        forward = Forward(config, weights, HALF)
        bound = bind(plan, weights, HALF)
        logits = forward.logits(images.half(), bound).float()
        quiet = record_calls(forward, bound, images.half(), execute=False)
    assert (logits - truth).abs().max() <= 1.5 * (eager - truth).abs().max()
    for stage, form in enumerate(forms):
        layers = {c.layer for c in quiet if c.stage == stage}
        assert "attention" in layers
        assert "qkv" not in layers
        assert ("proj" in layers) == (form.form == "heads")


@pytest.mark.parametrize(("version", "norm2"), [(1, "behind"), (2, "apart")], ids=["v1", "v2"])
def test_few_rows_with_fc2_cut_along_k(version, norm2):
    """V1: heads read rows that the join has normalised, fc1 raw ones with its norm behind.

    V2 has a norm in neither place.
    """
    model = tiny(version, depths=(2, 1), image_size=(12, 20), window_size=3)
    size = model.config.image_size
    table = forced(version, FusedRange("heads", config=HeadsConfig(32)), FusedRange("heads"))
    plan = make_plan(
        model.config, 2, size, CPU, HALF, "triton", pdl=True, fused_attention=table
    )  # fmt: skip
    fc1, tiles = OneShotConfig(16, 64, 4), OneShotConfig(16, 32, 4)
    stages = tuple(
        dataclasses.replace(
            s, mlp="split-k", merge=s.merge and "tiled", norm2=norm2,
            launch={"fc1": fc1, "merge": tiles, "proj": tiles}
            | {"attention": s.launch.get("attention")},
        )
        for s in plan.stages
    )  # fmt: skip
    plan = dataclasses.replace(plan, stages=stages)
    images = images_like(model, 2)
    with torch.no_grad():
        truth = model(images)
        eager = copy.deepcopy(model).half()(images.half()).float()
        weights = prepare(model, CPU, torch.float16)
        forward, bound = Forward(model.config, weights, HALF), bind(plan, weights, HALF)
        logits = forward.logits(images.half(), bound).float()
        calls = record_calls(forward, bound, images.half(), execute=False)
    assert (logits - truth).abs().max() <= 1.5 * (eager - truth).abs().max()
    norms: Counter = Counter()
    for call in calls:
        if call.layer == "norm":
            norms[call.stage, call.kwargs.get("norm")] += call.count
    if version == 1:
        assert norms == {(0, "pre"): 1, (0, "none"): 1, (1, "none"): 1}
    else:  # behind proj and, of the first stage, merging; behind fc2
        assert norms == {(0, None): 3, (0, "post"): 2, (1, None): 1, (1, "post"): 1}


def plan_of(name: str, batch: int, table: dict | None, precision: str = "fp16"):
    config = find_variant(name)
    size = config.image_size
    chosen = PRECISIONS[precision]
    return make_plan(config, batch, size, CPU, chosen, "triton", fused_attention=table)


def test_the_table_decides_by_windows():
    table = {(1, 96): (FusedRange("heads", most=64), FusedRange("window", fewest=512))}
    words = {
        batch: plan_of("swin_tiny_patch4_window7_224", batch, table).stages[0].attention
        for batch in (1, 4, 8)
    }
    assert words == {1: "fused", 4: "triton", 8: "fused"}
    assert plan_of("swin_tiny_patch4_window7_224", 1, table).stages[1].attention == "triton"
    wide = plan_of("swin_tiny_patch4_window7_224", 1, table, "fp32")
    assert {s.attention for s in wide.stages} == {"triton"}


def test_what_no_kernel_holds_stays_apart_with_the_reason():
    table = {(1, C): (FusedRange("window"),) for C in (128, 512)}
    plan = plan_of("swin_base_patch4_window7_224", 1, table)
    assert plan.stages[0].attention == "fused"
    assert plan.stages[2].attention == "triton"
    assert plan.stages[2].reasons["fused attention"] == "512 channels exceed 192"
    table = {(1, 128): (FusedRange("window"),)}
    plan = plan_of("swin_base_patch4_window12_384", 1, table)
    assert plan.stages[0].reasons["fused attention"] == "144 tokens a window exceed 64"


def test_the_engine_table_holds_what_kernels_hold():
    """Every range can run, is of one size of windows and begins behind the one before."""
    for (version, C), ranges in FUSED_ATTENTION.items():
        assert version in (1, 2)
        end = 0
        for one in ranges:
            assert one.form in ("heads", "window")
            assert end < one.fewest <= one.most
            end = one.most
            assert one.tokens == {1: 49, 2: 64}[version]
            whole = one.form == "window"
            assert attention_half_blocker(C, C // 32, one.tokens, whole, 0, one.config) is None


@pytest.mark.parametrize(
    ("name", "batch", "words"),
    [
        ("swin_tiny_patch4_window7_224", 1, ["", "heads", "heads", ""]),
        ("swin_tiny_patch4_window7_224", 8, ["window", "window", "", ""]),
        ("swin_tiny_patch4_window7_224", 32, ["", "", "", ""]),
        ("swin_base_patch4_window7_224", 8, ["window", "", "", ""]),
        ("swin_large_patch4_window7_224", 1, ["", "heads", "heads", ""]),
        ("swinv2_tiny_window8_256", 1, ["heads", "heads", "heads", "heads"]),
        ("swinv2_tiny_window8_256", 8, ["window", "window", "heads", ""]),
        ("swinv2_tiny_window8_256", 32, ["window", "", "", ""]),
        ("swinv2_tiny_window16_256", 1, ["", "", "", "heads"]),
        ("swin_base_patch4_window12_384", 8, ["", "", "", ""]),
    ],
    ids=str,
)
def test_stages_that_the_engine_table_changes(name, batch, words):
    """Windows of 12 and 16 were not measured: only a last stage of 8x8 tokens is one of 8."""
    stages = plan_of(name, batch, FUSED_ATTENTION).stages
    found = {"inside": "window", "library": "heads", "fused": "heads"}
    assert [found[s.proj] if s.attention == "fused" else "" for s in stages] == words
    for stage in stages:
        assert (stage.qkv == "inside") == (stage.attention == "fused")


@pytest.mark.parametrize(
    ("capability", "fused"), [((9, 0), True), ((10, 0), True), ((12, 0), False), ((8, 9), False)]
)
def test_the_engine_table_needs_shared_memory_for_its_tiles(capability, fused, monkeypatch):
    monkeypatch.setattr("fastswin.engine.plan.device_capability", lambda device: capability)
    plan = plan_of("swin_tiny_patch4_window7_224", 8, None)
    assert (plan.stages[0].attention == "fused") == fused


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [True, False], ids=["programmatic", "plain"])
@pytest.mark.parametrize("form", ["heads", "window"])
@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("swin_tiny_patch4_window7_224", 1),
        ("swin_tiny_patch4_window7_224", 8),
        ("swinv2_tiny_window8_256", 2),
    ],
    ids=["tiny-1", "tiny-8", "v2-2"],
)
def test_same_answer_as_separate_kernels(name, batch, form, pdl):
    """Every stage that can take the form; three runs and a graph give the same bits."""
    device = torch.device("cuda")
    model = create_model(name, pretrained=False).eval().to(device)
    config = model.config
    table = {
        (config.version, config.dim(stage)): (FusedRange(form),)
        for stage in range(config.num_stages)
    }
    size = config.image_size
    plans = [
        make_plan(config, batch, size, device, HALF, pdl=pdl, fused_attention=chosen)
        for chosen in (table, {})
    ]
    assert plans[0].stages[0].attention == "fused"
    weights = prepare(model, device, torch.float16)
    forward = Forward(config, weights, HALF)
    images = images_like(model, batch).half().to(device)
    with torch.no_grad():
        truth = model(images.float())
        bounds = [bind(plan, weights, HALF) for plan in plans]
        torch.cuda.synchronize()
        fused, apart = (forward.logits(images, bound) for bound in bounds)
        errors = [(y.float() - truth).abs().max().item() for y in (fused, apart)]
        assert errors[0] <= 1.5 * errors[1]
        for _ in range(2):
            assert torch.equal(forward.logits(images, bounds[0]), fused)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = forward.logits(images, bounds[0])
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, fused)
    assert dataclasses.asdict(bounds[0].plan)["stages"][0]["qkv"] == "inside"
