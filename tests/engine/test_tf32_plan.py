"""Products of a tf32 engine in our kernels: what the plan takes, and right answers."""

from __future__ import annotations

import pytest
import torch
from engine_cases import images_like, tiny

import fastswin.engine.stage_choice as choice_module
from fastswin.engine import tf32
from fastswin.engine.bind import bind
from fastswin.engine.calls import record_calls
from fastswin.engine.forward import Forward
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare, round_to_tf32
from fastswin.ops.hopper_gemm.config import HopperGemmConfig
from fastswin.ops.linear.config import GemmConfig, LayerNormLinearConfig
from fastswin.ops.mlp.config import MlpConfig

CPU = torch.device("cpu")
TF32 = PRECISIONS["tf32"]
SMALL = {"depths": (1, 1), "image_size": (16, 24), "window_size": 4}

GEMM, MLP = GemmConfig(64, 64, 32, 4, 2, tma=True), MlpConfig(32, 32, 4, 2, tma=True)
NORM = LayerNormLinearConfig(32, 32, 1, 4, 2)
TABLE = {
    (version, *key): (1, tiles)
    for version in (1, 2)
    for key, tiles in ((("fc1", 32), GEMM), (("qkv", 32), NORM), (("mlp", 64), MLP))
}


@pytest.mark.parametrize(
    ("version", "table", "words"),
    [
        (1, {}, [("library", "unfused"), ("library", "unfused")]),
        (1, TABLE, [("fused", "library"), ("library", "fused")]),
        (2, TABLE, [("library", "library"), ("library", "fused")]),
        (1, {key: (1 << 30, tiles) for key, (_, tiles) in TABLE.items()},
         [("library", "unfused"), ("library", "unfused")]),
    ],
    ids=["empty", "v1", "v2", "few-rows"],
)  # fmt: skip
def test_answers_with_the_words_of_the_table(version, table, words, monkeypatch):
    monkeypatch.setattr(choice_module, "TF32_PRODUCTS", table)
    model = tiny(version, **SMALL)
    plan = make_plan(model.config, 1, model.config.image_size, CPU, TF32, "triton")
    assert [(s.qkv, s.mlp) for s in plan.stages] == words
    if not any(fewest == 1 for fewest, _ in table.values()):
        return
    forward = Forward(model.config, prepare(model, CPU, torch.float32, tf32=True), TF32)
    bound, images = bind(plan, forward.weights, TF32), images_like(model, 1)
    with torch.no_grad():
        truth, logits = model(images), forward.logits(images, bound)
        calls = record_calls(forward, bound, images, execute=False)
    # the interpreter multiplies in fp32: what is off are weights, rounded, and GELU
    assert (logits - truth).abs().max().item() < 5e-3 * truth.abs().max().item()
    ours = [c for c in calls if c.kwargs.get("input_precision") == "tf32"]
    names = [c.layer for c in ours]
    assert names == (["qkv"] if version == 1 else []) + ["fc1", "mlp"]
    assert [c.kwargs["config"] for c in ours] == ([NORM] if version == 1 else []) + [GEMM, MLP]


def test_other_precisions_take_nothing_of_it(monkeypatch):
    monkeypatch.setattr(choice_module, "TF32_PRODUCTS", TABLE)
    config = tiny(1, **SMALL).config
    plan = make_plan(config, 1, config.image_size, CPU, PRECISIONS["fp32"], "triton")
    assert [(s.qkv, s.mlp) for s in plan.stages] == [("library", "library")] * 2
    assert PRECISIONS["fp16"].input_precision is None


def test_only_matrices_of_tf32_are_rounded():
    """Vectors, norms and the patch embedding stay; fp32 keeps every bit."""
    model = tiny(1, **SMALL)
    exact, rounded = (prepare(model, CPU, torch.float32, tf32=tf32) for tf32 in (False, True))
    a, b = exact.stages[0][0], rounded.stages[0][0]
    for name in ("qkv", "proj", "fc1", "fc2"):
        assert torch.equal(getattr(b, name).weight, round_to_tf32(getattr(a, name).weight))
        assert not torch.equal(getattr(b, name).weight, getattr(a, name).weight)
        assert torch.equal(getattr(b, name).bias, getattr(a, name).bias)
    assert torch.equal(exact.patch_weight, rounded.patch_weight)


@pytest.mark.parametrize("version", [1, 2])
def test_fp32_of_many_values_is_three_products(version, monkeypatch):
    """All products of a stage, onto the stream in place (V1) or a branch with its norm (V2)."""
    monkeypatch.setattr(tf32, "SPLIT_VALUES", 32 * 20)  # the first stage has 24 tokens, the next 6
    monkeypatch.setattr(tf32, "SPLIT_EMBED", True)
    model = tiny(version, **SMALL)
    fp32 = PRECISIONS["fp32"]
    plan = make_plan(model.config, 1, model.config.image_size, CPU, fp32, "triton")
    assert [s.split for s in plan.stages] == [True, False]
    assert "three TF32 products" in plan.stages[0].reasons["gemm"]
    forward = Forward(model.config, prepare(model, CPU, torch.float32), fp32)
    bound, images = bind(plan, forward.weights, fp32), images_like(model, 1)
    with torch.no_grad():
        truth, logits = model.double()(images.double()), forward.logits(images, bound)
        eager = model.float()(images)
        calls = record_calls(forward, bound, images, execute=False)
    bound_error = 2 * ((eager - truth).abs().max().item() + 2**-24 * truth.abs().max().item())
    assert (logits - truth).abs().max().item() <= bound_error
    ours = [c for c in calls if c.kwargs.get("input_precision") == "tf32x3"]
    assert [c.layer for c in ours] == ["embed", "qkv", "proj", "fc1", "fc2", "merge"]
    assert [c.layer for c in ours if c.kwargs.get("activation") == "gelu"] == ["fc1"]
    attention = [c.kwargs["split"] for c in calls if c.layer == "attention"]
    assert attention == [True, False]
    assert [c.layer for c in calls if c.function is torch.ops.aten.gelu_] == []


def test_rows_that_a_product_cuts_off_are_tf32_numbers(monkeypatch):
    """The Hopper product reads fp32 rows as they lie: the norm in front of it rounds them."""
    tiles = HopperGemmConfig(128, 128, 32, 5)
    table = {(1, layer, 32): (1, tiles) for layer in ("fc1", "qkv")}
    monkeypatch.setattr(choice_module, "TF32_PRODUCTS", table)
    model = tiny(1, **SMALL)
    elsewhere = make_plan(model.config, 1, model.config.image_size, CPU, TF32, "triton").stages[0]
    assert (elsewhere.qkv, elsewhere.launch) == ("library", {"fc1": tf32.FC1_TILES})
    monkeypatch.setattr(tf32, "why_no_hopper_gemm", lambda *_, **__: None)
    plan = make_plan(model.config, 1, model.config.image_size, CPU, TF32, "triton")
    assert [(s.qkv, s.mlp) for s in plan.stages] == [("tiled", "library"), ("library", "unfused")]
    forward = Forward(model.config, prepare(model, CPU, torch.float32, tf32=True), TF32)
    bound, images = bind(plan, forward.weights, TF32), images_like(model, 1)
    calls = record_calls(forward, bound, images, execute=False)
    norms = [(c.stage, c.kwargs["tf32"]) for c in calls if c.layer == "norm"]
    assert set(norms) == {(0, True), (1, False)}
    products = [c for c in calls if c.kwargs.get("config") is tiles]
    assert [c.layer for c in products] == ["qkv", "fc1"]
    assert {c.kwargs["input_precision"] for c in products} == {"tf32"}


def test_long_windows_and_other_precisions_keep_their_products(monkeypatch):
    """Attention beyond the measured windows multiplies in IEEE; half precision embeds as it is."""
    monkeypatch.setattr(tf32, "SPLIT_VALUES", 1)
    monkeypatch.setattr(tf32, "SPLIT_WINDOW", 3)  # windows hold 16 tokens, and 4
    monkeypatch.setattr(tf32, "SPLIT_EMBED", True)
    config = tiny(1, **SMALL).config
    plans = {
        name: make_plan(config, 1, config.image_size, CPU, PRECISIONS[name], "triton")
        for name in ("fp32", "tf32", "fp16")
    }
    assert [s.split_attention for s in plans["fp32"].stages] == [False, False]
    assert [s.split for s in plans["fp32"].stages] == [True, True]
    assert not any(s.split or s.split_attention for s in plans["tf32"].stages)
    embeds = {name: plan.embed_products for name, plan in plans.items()}
    assert embeds == {"fp32": "tf32x3", "tf32": "tf32x3", "fp16": None}
