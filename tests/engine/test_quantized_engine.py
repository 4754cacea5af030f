"""Quantised engines against the integer reference: answers, layers, refusals, state, memory."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
from engine_cases import images_like, largest_difference, tiny
from quantized_cases import (
    AWKWARD,
    SCHEMES,
    check_layers,
    make_case,
    precision_for,
    reference_engine,
    relative_rms,
)

from fastswin import quant
from fastswin.engine import Engine, operators
from fastswin.engine.bind import bind
from fastswin.engine.calls import record_calls
from fastswin.engine.quantized import mix
from fastswin.engine.quantized.formats import BlockFormats, LayerFormat, StageFormats
from fastswin.engine.quantized.library import library_affine
from fastswin.engine.quantized.prepare import LayerForms
from fastswin.ops.quantized_linear.ordering import restore_rows
from fastswin.ops.split_k.config import SplitKConfig
from fastswin.quant import QuantizationError, QuantizedSwin
from fastswin.quant.layers import quant_layers


@pytest.fixture(scope="module", params=[1, 2], ids=["v1", "v2"])
def case(request):
    return make_case(request.param)


@pytest.fixture(scope="module")
def v1():
    return make_case(1)


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_the_integer_reference(case, name):
    """In fp32 the two differ by sums that round apart, which may move a value by one step."""
    scheme = SCHEMES[name]
    calibration = case.calibration(scheme)
    reference = QuantizedSwin(case.model, calibration)(case.images)
    engine = reference_engine(case, precision_for(scheme), calibration=calibration)
    logits = engine(case.images)
    assert logits.dtype == torch.float32
    assert relative_rms(logits, reference) <= 0.2 * relative_rms(reference, case.exact)
    assert torch.equal(logits.argmax(1), reference.argmax(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_a_half_precision_stream_is_no_worse_than_the_reference(case, dtype):
    calibration = case.calibration("int8")
    reference = QuantizedSwin(case.model, calibration)(case.images)
    engine = reference_engine(case, calibration=calibration, wide_dtype=dtype)
    logits = engine(case.images)
    assert logits.dtype == engine.dtype == dtype
    with torch.no_grad():
        half = reference_engine_in(case, dtype)
    allowed = relative_rms(reference, case.exact) + relative_rms(half, case.exact)
    assert relative_rms(logits, case.exact) <= 1.5 * allowed


def reference_engine_in(case, dtype):
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    return Engine(case.model, name, device="cpu", impl="reference")(case.images)


@pytest.mark.parametrize("name", ["int8", "int8_mode1", "fp8", "per_token"])
def test_every_layer_is_within_one_step(name):
    case = make_case(1, depths=(1, 1))
    calibration = case.calibration(SCHEMES[name])
    engine = reference_engine(case, precision_for(SCHEMES[name]), calibration=calibration)
    compared = check_layers(engine, QuantizedSwin(case.model, calibration), case.images)
    assert compared.keys() >= {"qkv", "proj", "fc1", "fc2", "merge"}
    assert ("layer_norm" in compared) == (name != "per_token")


LAYERS = ("*.attn.qkv", "*.attn.proj", "*.mlp.fc1", "*.mlp.fc2", "layers.0.blocks.1.*")


@pytest.mark.parametrize("pattern", LAYERS)
def test_layers_that_the_scheme_leaves_wide(v1, pattern):
    scheme = quant.PRESETS["int8"].override({pattern: quant.WIDE})
    calibration = v1.calibration(scheme)
    engine = reference_engine(v1, calibration=calibration)
    reference = QuantizedSwin(v1.model, calibration)(v1.images)
    assert relative_rms(engine(v1.images), reference) <= 2e-3
    wide = sum(not r.scheme.quantized for r in calibration.layers.values())
    total = len(calibration.layers)
    assert wide > 0
    assert engine.report().quantized_layers == f"{total - wide}/{total}"


def test_any_batch_and_size_and_strides(v1):
    calibration = v1.calibration("int8")
    engine = reference_engine(v1, calibration=calibration)
    reference = QuantizedSwin(v1.model, calibration)
    assert engine(v1.images[:0]).shape == (0, 15)
    for size in ((34, 50), (47, 33)):
        images = images_like(v1.model, 3, size)
        expected = reference(images)
        bound = 2e-2 * expected.abs().max()
        assert largest_difference(engine(images), expected) <= bound
        strided = images.contiguous(memory_format=torch.channels_last)
        assert largest_difference(engine(strided), expected) <= bound
        assert largest_difference(engine(images[2:]), expected[2:]) <= bound
    maps = engine.features(v1.images, "NHWC")
    again = v1.model.head(v1.model.norm(maps[-1]).mean(dim=(1, 2)))
    assert largest_difference(again, engine(v1.images)) <= 1e-4


def test_a_calibrated_checkpoint_brings_its_ranges(v1, tmp_path):
    found = [v1.calibration(name) for name in ("int8", "fp8")]
    path = quant.save_quantized(v1.model, found, tmp_path / "model.safetensors")
    for calibration in found:
        name = calibration.scheme.name
        direct = reference_engine(v1, name, calibration=calibration)(v1.images)
        engine = reference_engine(path, name)
        assert torch.equal(engine(v1.images), direct)
        assert f"scheme: {name}, calibrated on 8 images, mix 'auto'" in str(engine.report())
    with pytest.raises(QuantizationError, match=r"calibrated for \['fp8', .*, not int8_mode2"):
        reference_engine(path, "int8_mode2")


def spoiled(calibration, **changes):
    name = "layers.0.blocks.1.mlp.fc1"
    layer = dataclasses.replace(calibration.layers[name], **changes)
    return dataclasses.replace(calibration, layers={**calibration.layers, name: layer})


def without(calibration, *names):
    layers = {k: v for k, v in calibration.layers.items() if k not in names}
    return dataclasses.replace(calibration, layers=layers)


REFUSED = {
    "none": ("int8", lambda case: None, "precision 'int8' needs calibration="),
    "one-missing": (
        "int8",
        lambda case: without(case.calibration("int8"), "layers.0.blocks.0.mlp.fc2"),
        "1 of 13 layers have no range: layers.0.blocks.0.mlp.fc2",
    ),
    "nan": (
        "int8",
        lambda case: spoiled(case.calibration("int8"), input_amax=math.nan),
        "must be finite .* not so in layers.0.blocks.1.mlp.fc1",
    ),
    "inf": (
        "fp8",
        lambda case: spoiled(case.calibration("fp8"), input_amax=math.inf),
        "must be finite .* not so in layers.0.blocks.1.mlp.fc1",
    ),
    "other-format": ("int8", lambda case: case.calibration("fp8"), "needs an int8 .* scheme 'fp8'"),
    "other-format-fp8": ("fp8", lambda case: case.calibration("int8"), "needs an fp8 calibration"),
    "mode1-as-int8": (
        "int8",
        lambda case: case.calibration("int8_mode1"),
        "'int8_mode1' is that of int8_mode1; use precision 'int8_mode1'",
    ),
    "mode1-as-mode2": (
        "int8_mode2",
        lambda case: case.calibration("int8_mode1"),
        "'int8_mode2' needs ranges of its own preset, got scheme 'int8_mode1'",
    ),
    "int8-as-mode1": (
        "int8_mode1",
        lambda case: case.calibration("int8"),
        "'int8_mode1' needs ranges of its own preset, got scheme 'int8'",
    ),
    "other-weights": (
        "int8",
        lambda case: make_case(1, num_classes=5).calibration("int8"),
        "made for other weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_the_modules_named(v1, refusal):
    precision, make, message = refusal
    with pytest.raises(QuantizationError, match=message):
        reference_engine(v1, precision, calibration=make(v1))


def test_arguments_that_do_not_apply(v1):
    with pytest.raises(ValueError, match=r"mix must be one of .* got 'all'"):
        reference_engine(v1, mix="all")
    with pytest.raises(ValueError, match="wide_dtype is for quantised precisions"):
        reference_engine(v1, "fp32", wide_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"wide_dtype must be one of .* got torch.int8"):
        reference_engine(v1, wide_dtype=torch.int8)
    with pytest.raises(ValueError, match="CPU runtimes serve 'int8'"):
        Engine(v1.model, "fp8", device="cpu", backend="onnxruntime")


def test_ranges_of_zero_give_exact_zeros():
    """A dead layer: weights and bias 0, so its output range is 0, and so is what fc2 reads."""
    model = tiny(1, **AWKWARD, depths=(1, 1))
    with torch.no_grad():
        for name in ("fc1", "fc2"):
            layer = getattr(model.layers[0].blocks[0].mlp, name)
            layer.weight.zero_()
            layer.bias.zero_()
        model.layers[0].blocks[0].norm2.bias.zero_()
    images = images_like(model, 2)
    name = "int8_mode1"
    calibration = quant.calibrate(model, images, name)
    assert calibration.layers["layers.0.blocks.0.mlp.fc2"].input_amax == 0.0
    engine = reference_engine(model, name, calibration=calibration)
    logits = engine(images)
    assert bool(logits.isfinite().all())
    expected = QuantizedSwin(model, calibration)(images)
    assert relative_rms(logits, expected) <= 5e-3
    fc2 = next(c for c in engine.calls(images) if (c.stage, c.layer) == (0, "fc2"))
    assert not fc2.args[0].float().any()
    assert not fc2.function(*fc2.args, **{**fc2.kwargs, "residual": None, "out": None}).any()


def test_constant_and_infinite_images(v1):
    calibration = quant.calibrate(v1.model, torch.full_like(v1.images, 0.5), "int8")
    engine = reference_engine(v1, calibration=calibration)
    assert bool(engine(v1.images).isfinite().all())  # saturated, not garbage
    images = v1.images.clone()
    images[1, 0, 5, 5] = math.inf
    for name in ("int8", "int8_mode1", "fp8"):
        engine = reference_engine(v1, name, calibration=v1.calibration(name))
        logits = engine(images)
        assert not bool(logits[1].isfinite().any()), "an infinite image must not look answered"
        assert bool(logits[[0, 2]].isfinite().all())


def test_refresh_takes_the_same_weights_and_refuses_others(v1):
    model = tiny(1, **AWKWARD, depths=(2, 1))
    images = images_like(model, 2)
    engine = reference_engine(model, calibration=quant.calibrate(model, images, "int8"))
    before = engine(images)
    engine.refresh()
    assert torch.equal(engine(images), before)
    with torch.no_grad():
        model.layers[0].blocks[0].mlp.fc1.weight.mul_(1.5)
    assert torch.equal(engine(images), before), "weights are a snapshot"
    with pytest.raises(QuantizationError, match="made for other weights"):
        engine.refresh()
    assert torch.equal(engine(images), before), "a refused refresh changes nothing"


def test_trained_ranges_serve_the_trained_weights(v1):
    model = tiny(1, **AWKWARD, depths=(1, 1))
    images = images_like(model, 4)
    student = quant.QatModel(model, quant.calibrate(model, images, "int8"))
    student.train()
    student(images).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(1e-2 * parameter.grad)
    student.eval()
    with torch.no_grad():
        expected = student(images)
    logits = reference_engine(model, calibration=student.finish())(images)
    assert relative_rms(logits, expected) <= 2e-2


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


def test_the_mlp_in_one_kernel(monkeypatch):
    """Its 8-bit kernel in the interpreter; proj's bias is pending before it and gone behind."""
    everywhere = {"int8": {192: 0}}
    monkeypatch.setattr(mix, "FUSED_MLP_ROWS", everywhere)
    case = make_case(1, depths=(1, 1), image_size=(16, 24), embed_dim=32, num_heads=(1, 2))
    calibration = case.calibration("int8")
    engine = Engine(
        case.model, "int8", device="cpu", impl="triton", calibration=calibration,
        wide_dtype=torch.float16,
    )  # fmt: skip
    reference = QuantizedSwin(case.model, calibration)
    error = relative_rms(reference(case.images), case.exact)
    assert relative_rms(engine(case.images), case.exact) <= 1.5 * error
    fused = [c for c in engine.calls(case.images) if c.name == "ops.quantized_mlp"]
    assert [call.layer for call in fused] == ["mlp", "mlp"]
    for number, call in enumerate(fused):
        fc1 = reference.linears[f"layers.{number}.blocks.0.mlp.fc1"]
        assert torch.equal(restore_rows(call.args[1]), fc1.weight.to(torch.int8))
        own = {**call.kwargs, "out": None}
        wanted = call.function(*call.args, **{**own, "impl": "reference"}).float()
        assert relative_rms(call.function(*call.args, **own), wanted) <= 2e-3
    offsets = engine._plans.bound(3, (16, 24)).offsets
    assert offsets[0][0].norm2 is not None
    assert engine._plans.bound(3, (16, 24)).stage_end == (None, None)
    assert "in one kernel" in str(engine.report(3))


def test_few_rows_cut_fc2_along_k():
    """8-bit slices, joined by the LayerNorm that rounds for the next qkv, or alone at the end."""
    case = make_case(1, image_size=(16, 24), embed_dim=32, num_heads=(1, 2))
    calibration = case.calibration("int8")
    engine = Engine(
        case.model, "int8", device="cpu", impl="triton", calibration=calibration, mix="scheme",
        wide_dtype=torch.float16,
    )  # fmt: skip
    images = case.images[:1].half()
    words = {"mlp": "split-k", "launch": {"fc2": SplitKConfig(2, 16, 32, 4)}}
    plan = engine._plans.bound(1, (16, 24)).plan
    stages = tuple(dataclasses.replace(stage, **words) for stage in plan.stages)
    forward = engine._forward
    bound = bind(dataclasses.replace(plan, stages=stages), forward.weights, forward.precision)
    with torch.no_grad():
        logits = forward.logits(images, bound)
        names = [call.name for call in record_calls(forward, bound, images)]
    assert names.count("ops.split_k_linear") == 2
    assert names.count("ops.add_split_k") == 3
    reference, exact = QuantizedSwin(case.model, calibration)(case.images[:1]), case.exact[:1]
    assert relative_rms(logits, exact) <= 1.5 * relative_rms(reference, exact)


def test_kernels_under_the_interpreter():
    """int8 layers on their kernels, proj in place by the library with its bias pending."""
    case = make_case(1, depths=(1, 1), image_size=(16, 24), num_heads=(1, 2))
    scheme = quant.PRESETS["int8"].override({"*.proj": quant.WIDE})
    calibration = case.calibration(scheme)
    engine = Engine(
        case.model, "int8", device="cpu", impl="triton", mix="scheme", calibration=calibration,
        wide_dtype=torch.float16,
    )  # fmt: skip
    reference = QuantizedSwin(case.model, calibration)
    error = relative_rms(reference(case.images), case.exact)
    assert relative_rms(engine(case.images), case.exact) <= 1.5 * error
    assert check_layers(engine, reference, case.images).keys() >= {"qkv", "fc1", "fc2", "merge"}
    assert "int8 (triton)" in str(engine.report(3))
    assert engine._plans.bound(3, (16, 24)).offsets[0][0].norm2 is not None
