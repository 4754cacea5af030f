"""The report: a plan that people and programs can read."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from engine_cases import cpu_engine, tiny

from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.models import find_variant

CPU = torch.device("cpu")


def test_report_is_json_and_text():
    engine = cpu_engine(tiny(1), "bf16")
    report = engine.report(3, (41, 75))
    values = json.loads(json.dumps(report.to_dict()))
    assert (values["precision"], values["device"], values["graphs"]) == ("bf16", "cpu", [])
    assert values["weights_mib"] > 0
    assert (values["plan"]["batch"], values["plan"]["image_size"]) == (3, [41, 75])
    stages = values["plan"]["stages"]
    assert [s["map_size"] for s in stages] == [[11, 19], [6, 10]]
    assert [s["qkv"] for s in stages] == ["reference", "reference"]
    text = str(report)
    for words in ("batch 3, image 41x75", "stage 1: map 6x10, 64 channels, 2 blocks", "window 4x4"):
        assert words in text


def test_report_says_which_graphs_copy_and_why():
    report = cpu_engine(tiny(1)).report()
    assert report.copies == ()
    graph = ("logits", 8, (3, 34, 50))
    copying = dataclasses.replace(report, graphs=(graph,), copies=((graph, "results differ"),))
    assert "1 CUDA graphs captured\n  logits of 8 images: results differ\n" in str(copying)


def test_report_names_why_no_kernel_runs():
    reasons = cpu_engine(tiny(1), impl="reference").report().plan.stages[0].reasons
    assert reasons == {"all": "impl='reference'"}


def test_report_defaults_to_the_models_image_size():
    engine = cpu_engine(tiny(1))
    assert engine.report().plan.image_size == (34, 50)


def plan(name, batch, precision="fp16"):
    config = find_variant(name)
    return make_plan(config, batch, config.image_size, CPU, PRECISIONS[precision], "triton")


def test_plan_depends_on_the_batch():
    small, large = (plan("swin_tiny_patch4_window7_224", batch) for batch in (1, 64))
    assert [s.mlp for s in small.stages] != [s.mlp for s in large.stages]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("name", ["swin_large_patch4_window12_384", "swinv2_base_window16_256"])
def test_every_layer_that_is_not_fused_says_why(name, batch, precision):
    for stage in plan(name, batch, precision).stages:
        slower = [layer for layer in ("qkv", "mlp") if getattr(stage, layer) != "fused"]
        for layer in slower:
            assert stage.reasons.get(layer) or stage.reasons.get("gemm"), (stage.stage, layer)


def test_impl_triton_needs_a_device_that_runs_it(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match=r"impl='triton' cannot run here: .* on the CPU"):
        cpu_engine(tiny(1), impl="triton")
