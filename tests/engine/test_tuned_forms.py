"""Forms and tiles that only a tuning table chooses give the same answers."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter

import pytest
import torch
from engine_cases import images_like, largest_difference, tiny

from fastswin.engine.bind import bind
from fastswin.engine.calls import record_calls
from fastswin.engine.forward import Forward
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare
from fastswin.engine.tuned import attention_kernel, stage_kernels, stage_layers
from fastswin.models.variants import find_variant
from fastswin.ops.hopper_gemm.config import DEFAULT_CONFIG, PLAIN_CONFIG, chosen_config
from fastswin.tuning.card import H100
from fastswin.tuning.document import empty_document
from fastswin.tuning.problem import config_to_dict
from fastswin.tuning.space import candidates, default_for
from fastswin.tuning.table import TuningTable

CPU = torch.device("cpu")
HALF = PRECISIONS["fp16"]
SMALL = {"depths": (1, 1), "image_size": (16, 20), "window_size": 4}
BATCH = 2

#: No tensor copy engine: its tiles run in the interpreter too.
CARD = dataclasses.replace(H100, capability=(8, 0))


def table_for(config, qkv: str, mlp: str) -> TuningTable:
    """Every layer in one form, every kernel with the last of its candidates."""
    document = empty_document(CARD)
    post_norm = config.version == 2
    for stage in range(config.num_stages):
        H, W = config.map_size(stage)
        sized = ("fp16", BATCH * H * W, config.dim(stage), config.hidden_dim(stage), post_norm)
        chosen = {"qkv": qkv, "mlp": mlp}
        for name, layer in stage_layers(*sized).items():
            document["choices"].append({
                "layer": name, "dtype": "fp16", "triton": "3.6", "shape": layer.dims,
                "rows": layer.rows, "range": [layer.rows, layer.rows], "choice": chosen[name],
                "latency_us": {chosen[name]: 1.0}, "verdict": "gain",
            })  # fmt: skip
        kernels = stage_kernels(*sized, qkv, mlp)
        kernels["attention"] = attention_kernel(
            "fp16", BATCH, (H, W), config.stage_window(stage), config.num_heads[stage],
            config.head_dim(stage), post_norm,
        )  # fmt: skip
        for problem in kernels.values():
            other = candidates(problem, CARD)[-1]
            document["configs"].append({
                "op": problem.op, "dtype": "fp16", "triton": "3.6", "shape": problem.dims,
                "rows": problem.rows, "range": [problem.rows, problem.rows],
                "config": config_to_dict(other), "shared_bytes": 1024, "latency_us": 1.0,
                "default_us": 2.0, "verdict": "gain",
            })  # fmt: skip
    return TuningTable(document, CARD, "3.6.1", "test.json")


@pytest.mark.parametrize(
    ("version", "qkv", "mlp"),
    [(1, "tiled", "unfused"), (1, "fused", "library"), (2, "tiled", "unfused")],
    ids=lambda v: f"v{v}" if isinstance(v, int) else v,
)
def test_tuned_forms_answer_as_the_model_does(version, qkv, mlp):
    model = tiny(version, **SMALL)
    images = images_like(model, BATCH)
    with torch.no_grad():
        truth = model(images)
        eager = copy.deepcopy(model).half()(images.half())
    table = table_for(model.config, qkv, mlp)
    size = model.config.image_size
    plan = make_plan(model.config, BATCH, size, CPU, HALF, "triton", table)
    assert not table.refused
    assert {(s.qkv, s.mlp) for s in plan.stages} == {(qkv, mlp)}
    expected = {"attention", "qkv"} | ({"fc1"} if mlp == "library" else set())
    assert all(set(s.launch) == expected for s in plan.stages)
    weights = prepare(model, CPU, torch.float16)
    with torch.no_grad():
        ours = Forward(model.config, weights, HALF).logits(
            images.half(), bind(plan, weights, HALF)
        )  # fmt: skip
    assert bool(torch.isfinite(ours).all())
    assert largest_difference(ours, truth) <= 1.5 * largest_difference(eager, truth)


def test_tuned_tiles_differ_from_the_heuristics():
    config = tiny(1, **SMALL).config
    table = table_for(config, "fused", "library")
    kernels = stage_kernels("fp16", BATCH * 4 * 5, 32, 128, False, "fused", "library")
    assert any(table.config(p) != default_for(p, CARD) for p in kernels.values())


def test_without_a_table_qkv_of_many_rows_is_the_hopper_product(monkeypatch):
    """Where its tiles fill the card; a table that prefers the library is heard."""
    monkeypatch.setattr("fastswin.engine.stage_choice.measured_config", chosen_on_an_h200)
    config = find_variant("swin_base_patch4_window7_224")

    def qkv_of(batch, table=None):
        plan = make_plan(config, batch, config.image_size, CPU, HALF, "triton", table, False, {})
        return [(stage.qkv, stage.launch.get("qkv")) for stage in plan.stages]

    ours, library, fused = ("tiled", PLAIN_CONFIG), ("library", None), ("fused", None)
    assert qkv_of(32) == [fused, ours, ours, library]  # 13 x 24 tiles of 1,024 channels: library
    assert qkv_of(1) == [fused, library, library, library]
    H, W = config.map_size(2)
    layer = stage_layers("fp16", 32 * H * W, config.dim(2), config.hidden_dim(2), False)["qkv"]
    document = empty_document(CARD)
    document["choices"].append({
        "layer": "qkv", "dtype": "fp16", "triton": "3.6", "shape": layer.dims, "rows": layer.rows,
        "range": [layer.rows, layer.rows], "choice": "library", "latency_us": {"library": 1.0},
        "verdict": "gain",
    })  # fmt: skip
    table = TuningTable(document, CARD, "3.6.1", "test.json")
    assert qkv_of(32, table) == [fused, ours, library, library]


@pytest.mark.parametrize("version", [1, 2])
def test_norms_and_the_hopper_products_behind_them_are_launched_ahead(version, monkeypatch):
    """Attention behind them, the library's products and mergings are launched plainly."""
    monkeypatch.setattr("fastswin.engine.choice.FUSED_QKV_TOKENS", {})
    monkeypatch.setattr("fastswin.engine.choice.FUSED_MLP_CHANNELS", 0)
    monkeypatch.setattr(
        "fastswin.engine.stage_choice.measured_config",
        lambda form, M, N, K, *_: DEFAULT_CONFIG if K == 64 else None,
    )
    model = tiny(version, **SMALL)
    config = model.config
    assert config.dim(1) == 64  # the second stage has Hopper products, the first has not
    off = make_plan(config, 1, config.image_size, CPU, HALF, "triton", None, False, {})
    assert [stage.ahead for stage in off.stages] == [False, False]
    plan = make_plan(config, 1, config.image_size, CPU, HALF, "triton", None, None, {})
    assert [stage.ahead for stage in plan.stages] == [False, True]
    assert plan.stages[1].reasons["norm"] == (
        "launched programmatically, and qkv and fc1 behind it"
    )
    weights = prepare(model, CPU, torch.float16)
    forward = Forward(config, weights, HALF)
    images = images_like(model, 1).half()
    calls = record_calls(forward, bind(plan, weights, HALF), images, execute=False)
    ahead = Counter()
    for call in calls:
        if call.kwargs.get("pdl"):
            ahead[call.stage, call.layer] += call.count
    assert ahead == {(1, "norm"): 2, (1, "qkv"): 1, (1, "fc1"): 1}


def chosen_on_an_h200(form, M, N, K, dtype, device):
    return chosen_config(form, M, N, K, dtype.itemsize, 132)
