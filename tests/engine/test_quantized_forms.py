"""Forms of quantised layers: what is on the device, reported, called, and given to the library."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from engine_cases import images_like, tiny
from quantized_cases import (
    AWKWARD,
    SCHEMES,
    make_case,
    precision_for,
    reference_engine,
    relative_rms,
)

from fastswin import quant
from fastswin.engine import Engine, operators
from fastswin.engine.calls import record_calls
from fastswin.engine.quantized.formats import BlockFormats, LayerFormat, StageFormats
from fastswin.engine.quantized.library import library_affine
from fastswin.engine.quantized.prepare import LayerForms
from fastswin.quant import QuantizedSwin
from fastswin.quant.layers import quant_layers


@pytest.fixture(scope="module", params=[1, 2], ids=["v1", "v2"])
def case(request):
    return make_case(request.param)


@pytest.fixture(scope="module")
def v1():
    return make_case(1)


def forms_of(engine):
    weights = engine._forward.weights
    layers = [
        getattr(block, name)
        for stage in weights.stages
        for block in stage
        for name in ("qkv", "proj", "fc1", "fc2")
    ]
    return [*layers, *(merging.reduction for merging in weights.mergings)]


def test_only_forms_that_plans_ask_for_are_on_the_device(v1):
    wide = Engine(v1.model, "fp16", device="cpu", impl="reference")
    engine = reference_engine(v1, calibration=v1.calibration("int8"), wide_dtype=torch.float16)
    engine(v1.images)
    layers = forms_of(engine)
    assert all(isinstance(layer, LayerForms) for layer in layers)
    assert [layer.placed[0].dtype for layer in layers] == [torch.int8] * len(layers)
    assert all(len(layer.placed) == 1 for layer in layers)
    saved = sum(layer.placed[0].numel() for layer in layers)  # one byte an element
    mib = wide.report().weights_mib - saved / 2**20
    assert engine.report().weights_mib == pytest.approx(mib, abs=2e-4)


def test_the_report_tells_every_layer(v1):
    scheme = quant.PRESETS["int8"].override({"layers.0.blocks.1.mlp.*": quant.WIDE}, "mine")
    report = reference_engine(v1, calibration=v1.calibration(scheme)).report(2)
    text = str(report)
    assert "scheme: mine, calibrated on 8 images, mix 'auto'" in text
    alike = "qkv int8 (reference), attention int8, proj int8 (reference), fc1"
    assert f"block 0: {alike} int8 (reference), fc2 int8 (reference)" in text
    assert f"block 1: {alike} wide, fc2 wide" in text
    assert "merge: reduction int8 (reference)" in text
    values = json.loads(json.dumps(report.to_dict()))
    assert values["plan"]["stages"][0]["formats"]["blocks"][1]["fc1"]["format"] == "wide"
    assert report.quantized_layers == "11/13"


@pytest.mark.parametrize("name", ["int8_mode1", "per_token"])
def test_calls_without_running_them_have_the_shapes_of_real_ones(case, name):
    """What compiling ahead relies on; here nothing would launch, so all run."""
    calibration = case.calibration(SCHEMES[name])
    engine = reference_engine(case, precision_for(SCHEMES[name]), calibration=calibration)
    calls = engine.calls(case.images)
    bound = engine._plans.bound(3, case.model.config.image_size)
    quiet = record_calls(engine._forward, bound, case.images, execute=False)
    assert [(c.stage, c.layer, c.count, c.result.shape, c.result.dtype) for c in quiet] == [
        (c.stage, c.layer, c.count, c.result.shape, c.result.dtype) for c in calls
    ]
    counts = {}
    for call in calls:
        counts[call.stage, call.layer] = counts.get((call.stage, call.layer), 0) + call.count
    for stage, depth in enumerate(case.model.config.depths):
        for layer in ("qkv", "attention", "proj", "fc1", "fc2"):
            assert counts[stage, layer] >= depth, (stage, layer)
    assert torch.equal(calls[-1].result, engine(case.images))


def test_fp8_by_the_library(case):
    """Every layer in the form with one step a tensor, its operator on plain PyTorch."""
    calibration = case.calibration("fp8")
    engine = reference_engine(case, "fp8", calibration=calibration, wide_dtype=torch.float16)
    bound = engine._plans.bound(3, case.model.config.image_size)
    layers = quant_layers(case.model)
    for i, stage in enumerate(bound.plan.stages):
        for j, block in enumerate(engine._forward.weights.stages[i]):
            for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
                full = f"layers.{i}.blocks.{j}.{name}"
                operands = library_affine(layers[full], calibration.layers[full])
                assert operands is not None
                getattr(block, name.partition(".")[2])._library = operands
        by_library = LayerFormat("fp8", "cublaslt")
        blocks = tuple(
            BlockFormats(by_library, "fp8", by_library, by_library, by_library)
            for _ in stage.formats.blocks
        )
        object.__setattr__(stage, "formats", StageFormats(blocks, stage.formats.reduction))

    asked = set()

    def on_reference(name):
        def call(*args, **kwargs):
            asked.add((name, kwargs.get("impl")))
            if "impl" in kwargs:
                kwargs["impl"] = "reference"
            return getattr(operators, name)(*args, **kwargs)

        return call

    stand_ins = {name: on_reference(name) for name in operators.__all__}
    engine._forward.ops = SimpleNamespace(**stand_ins)
    with torch.no_grad():
        logits = engine._forward.logits(case.images.half(), bound)
    assert ("library_linear", "library") in asked
    assert ("quantized_linear", "triton") not in asked
    error = relative_rms(QuantizedSwin(case.model, calibration)(case.images), case.exact)
    assert relative_rms(logits, case.exact) <= 1.5 * error


def test_the_library_is_refused_weights_of_uneven_rows():
    model = tiny(1, **AWKWARD, depths=(1, 1))
    with torch.no_grad():
        model.layers[0].blocks[0].mlp.fc2.weight[3] *= 500.0
    calibration = quant.calibrate(model, images_like(model), "fp8")
    layers = quant_layers(model)
    for name, there in (("layers.0.blocks.0.mlp.fc2", False), ("layers.1.blocks.0.mlp.fc2", True)):
        found = library_affine(layers[name], calibration.layers[name])
        assert (found is not None) == there
