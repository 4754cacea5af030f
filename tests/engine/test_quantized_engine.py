"""Ranges that quantised engines take and refuse, arguments, and what a refresh keeps."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from engine_cases import images_like, tiny
from quantized_cases import AWKWARD, make_case, reference_engine

from fastswin import quant
from fastswin.engine import Engine
from fastswin.quant import QuantizationError


@pytest.fixture(scope="module")
def v1():
    return make_case(1)


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
