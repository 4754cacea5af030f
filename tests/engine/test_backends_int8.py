"""int8 on a CPU: the calibrated model's answers, and no 16-bit sum that saturates."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from backend_cases import RUNTIMES, runtime_engine
from engine_cases import images_like, tiny

from fastswin.engine.backends.cpu import this_cpu
from fastswin.engine.backends.layers import Linear
from fastswin.quant import (
    LayerScheme,
    QuantizationError,
    QuantizedSwin,
    Scheme,
    calibrate,
    save_quantized,
)

#: Every activation and weight in 8 bits, outputs wide: what the runtimes compute.
WIDE_OUTPUTS = Scheme("int8_wide_outputs")


@pytest.fixture(scope="module", params=[1, 2], ids=["v1", "v2"])
def calibrated(request):
    model = tiny(request.param, depths=(2, 1))
    return model, calibrate(model, images_like(model, 8), WIDE_OUTPUTS)


def relative_rms(actual, expected):
    return ((actual - expected).square().mean() / expected.square().mean()).sqrt().item()


def integer_reference(model, calibration) -> QuantizedSwin:
    """True 8-bit operands in PyTorch, with the weights that this CPU's products allow."""
    reference = QuantizedSwin(model, calibration)
    for name, operands in reference.linears.items():
        weight, _ = reference.layers[name].folded(torch.float64)
        layer = Linear(weight.detach().float().numpy(), None, 1.0, operands.weight_scale.numpy())
        rows, steps = layer.quantized_weight(saturating=this_cpu().saturating)
        reference.linears[name] = dataclasses.replace(
            operands, weight=torch.from_numpy(rows), weight_scale=torch.from_numpy(steps)
        )
    return reference


@RUNTIMES
def test_answers_are_those_of_the_integer_reference(calibrated, runtime):
    """Up to roundings of one step here and there, which fp32 sums between products decide."""
    model, calibration = calibrated
    images = images_like(model, 6)
    engine = runtime_engine(model, runtime, "int8", calibration=calibration)
    reference = integer_reference(model, calibration)(images)
    with torch.no_grad():
        error = relative_rms(reference, model(images))
    logits = engine(images)
    assert logits.dtype == torch.float32
    assert relative_rms(logits, reference) <= 0.3 * error
    last = engine.features(images, "NHWC")[-1]
    with torch.no_grad():
        again = model.head(model.norm(last).mean(dim=(1, 2)))
    assert relative_rms(again, logits) <= 0.1 * error


@RUNTIMES
def test_large_weights_do_not_saturate(runtime):
    """All weights of a row alike and inputs at the end of their range: the worst pair sums."""
    model = small()
    with torch.no_grad():
        weight = model.layers[0].blocks[0].mlp.fc2.weight
        weight.copy_(weight.abs().amax(dim=1, keepdim=True).expand_as(weight))
    images = images_like(model, 4)
    calibration = calibrate(model, images, WIDE_OUTPUTS)
    engine = runtime_engine(model, runtime, "int8", calibration=calibration)
    reference = integer_reference(model, calibration)(images)
    with torch.no_grad():
        error = relative_rms(reference, model(images))
    assert relative_rms(engine(images), reference) <= 0.3 * error
    assert error <= 0.01


def random_linear(rows: int, columns: int) -> Linear:
    generator = np.random.default_rng(3)
    weight = generator.standard_normal((rows, columns)).astype(np.float32)
    weight[1] = 2.0  # every pair at the limit
    weight[2] = 0.0
    steps = np.abs(weight).max(axis=1) / 127
    return Linear(weight, None, 0.1, np.where(steps > 0, steps, 1.0).astype(np.float32))


@pytest.mark.parametrize("columns", [64, 33])
def test_pair_sums_fit_16_bits(columns):
    layer = random_linear(7, columns)
    weight, steps = layer.quantized_weight(saturating=True)
    padded = np.pad(np.abs(weight.astype(int)), ((0, 0), (0, columns % 2)))
    assert (255 * (padded[:, 0::2] + padded[:, 1::2])).max() <= 32767
    assert (np.abs(weight * steps[:, None] - layer.weight) <= 0.5001 * steps[:, None]).all()
    assert (steps >= layer.weight_scale).all()
    assert (steps <= 2.01 * layer.weight_scale).all()


def test_eight_bits_where_nothing_saturates():
    layer = random_linear(5, 40)
    weight, steps = layer.quantized_weight(saturating=False)
    assert (steps == layer.weight_scale).all()
    assert np.abs(weight.astype(int)).max(axis=1).tolist() == [127, 127, 0, 127, 127]


def test_the_scale_of_q_is_folded_exactly():
    layer = random_linear(6, 16)
    scaled = layer.scale_first(2, 0.125)
    before, _ = layer.quantized_weight(saturating=False)
    after, steps = scaled.quantized_weight(saturating=False)
    assert (before == after).all()
    assert (steps[:2] == 0.125 * layer.weight_scale[:2]).all()
    assert (steps[2:] == layer.weight_scale[2:]).all()


def test_ranges_come_from_a_calibrated_checkpoint(calibrated, tmp_path):
    model, calibration = calibrated
    path = save_quantized(model, calibration, tmp_path / "model.safetensors")
    images = images_like(model)
    engine = runtime_engine(path, "onnxruntime", "int8")
    direct = runtime_engine(model, "onnxruntime", "int8", calibration=calibration)
    assert torch.equal(engine(images), direct(images))


def small(**settings):
    return tiny(1, depths=(1,), num_heads=(2,), **settings)


def per_token(model):
    scheme = Scheme("per_token", qkv=LayerScheme(activation="per_token"))
    return calibrate(model, images_like(model), scheme)


def fp8(model):
    return calibrate(model, images_like(model), "fp8")


REFUSED = {
    "none": (lambda model: None, "precision 'int8' needs calibration="),
    "fp8": (fp8, "needs an int8 calibration, got scheme 'fp8'"),
    "per-token": (per_token, r"layers.0.blocks.0.attn.qkv: CPU runtimes need .*per_tensor"),
    "other-weights": (
        lambda model: calibrate(small(num_classes=5), images_like(model), "int8"),
        "made for other weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_refused_by_name(case):
    make, message = case
    model = small()
    with pytest.raises(QuantizationError, match=message):
        runtime_engine(model, "onnxruntime", "int8", calibration=make(model))


def test_refresh_refuses_ranges_of_older_weights():
    model = small()
    calibration = calibrate(model, images_like(model), WIDE_OUTPUTS)
    engine = runtime_engine(model, "onnxruntime", "int8", calibration=calibration)
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(QuantizationError, match="made for other weights"):
        engine.refresh()
