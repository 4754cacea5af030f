"""Quantised engines against the integer reference: logits, every layer, any size, odd values."""

from __future__ import annotations

import math

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
from fastswin.engine import Engine
from fastswin.quant import QuantizedSwin


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
