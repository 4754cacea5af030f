"""Fake quantisation and the integer reference: exact products, one step, any shape."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from quant_cases import SCHEMES, images_like, tiny

from fastswin import quant
from fastswin.quant.convert import integer_product, quantize_linear
from fastswin.quant.fake_quant import FakeQuant, input_scale, quantize
from fastswin.quant.forward import run
from fastswin.quant.layers import quant_layers
from fastswin.quant.observers import Histogram
from fastswin.quant.ranges import LayerRange


@pytest.fixture(scope="module", params=[1, 2], ids=["v1", "v2"])
def model(request):
    return tiny(request.param)


@pytest.fixture(scope="module")
def seen(model):
    return quant.observe(model, images_like(model, 3, seed=3))


class Float:
    """The folded float products."""

    def linear(self, layer, x):
        return F.linear(x, *layer.folded())

    def pad_qkv(self, layer):
        return layer.bias


def inputs_of(model, images):
    """What every layer reads in the float model."""
    inputs = {}

    class Recorder(Float):
        def linear(self, layer, x):
            inputs[layer.name] = x
            return super().linear(layer, x)

    with torch.no_grad():
        run(model, quant_layers(model), images, Recorder())
    return inputs


def test_folding_changes_nothing(model):
    """Padded windows included: their qkv is the bias before folding."""
    images = images_like(model)
    with torch.no_grad():
        torch.testing.assert_close(
            run(model, quant_layers(model), images, Float()), model(images), rtol=0, atol=3e-5
        )


@pytest.mark.parametrize(
    ("M", "K", "N"), [(1, 24, 15), (33, 1024, 7), (5, 1025, 3), (4, 6144, 9), (0, 24, 15)]
)
def test_integer_products_are_exact(M, K, N):
    generator = torch.Generator().manual_seed(K)
    a = torch.randint(-127, 128, (M, K), generator=generator)
    b = torch.randint(-127, 128, (N, K), generator=generator)
    if M:
        a[0], b[0] = 127, 127  # the largest sum there is
    expected = a @ b.t()
    assert torch.equal(integer_product(a.float(), b.float()).double(), expected.float().double())
    assert torch.equal(torch._int_mm(a.to(torch.int8), b.to(torch.int8).t()).long(), expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_layer_agrees_with_fake_quantisation_and_the_int8_gemm_exactly(model, seen, scheme):
    calibration = quant.calibration_of(model, seen, SCHEMES[scheme])
    integer = quant.QuantizedSwin(model, calibration)
    fake = FakeQuant(calibration.layers)
    for name, x in inputs_of(model, images_like(model)).items():
        r, layer = calibration.layers[name], integer.layers[name]
        with torch.no_grad():
            y, expected = integer.linears[name](x), fake.linear(layer, x)
        step = max(r.output_scale) if r.scheme.output == "quantized" else 0.0
        noise = 1e-5 * expected.abs().max().item()
        assert (y - expected).abs().max().item() <= step + noise, name
        if r.scheme.format != "int8":
            continue
        q = quantize(x, input_scale(x, r)[1], "int8")
        assert q.abs().max() <= 127
        assert bool((q == q.round()).all())
        linear = integer.linears[name]
        assert linear.weight.dtype == torch.int8
        rows = q.reshape(-1, q.shape[-1])
        sums = torch._int_mm(rows.to(torch.int8), linear.weight.t())
        assert torch.equal(linear.product(q).reshape(sums.shape), sums.float()), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_whole_models_agree_and_are_near_fp32(model, seen, scheme):
    calibration = quant.calibration_of(model, seen, SCHEMES[scheme])
    images = images_like(model)
    with torch.no_grad():
        expected = model(images)
        fake = run(model, quant_layers(model), images, FakeQuant(calibration.layers))
    found = quant.QuantizedSwin(model, calibration)(images)
    assert found.shape == expected.shape == (2, 15)
    assert F.cosine_similarity(found, expected).min() > 0.99  # SWO-24's bound
    scale = expected.abs().max()
    assert (found - fake).abs().max() < 0.02 * scale  # a tie that falls the other way spreads
    assert (found - expected).abs().max() > 0


@pytest.mark.parametrize("batch", [0, 1])
def test_batches_of_none_and_one(model, seen, batch):
    quantized = quant.QuantizedSwin(model, quant.calibration_of(model, seen, "int8"))
    images = images_like(model, 2)
    together = quantized(images)
    assert quantized(images[:batch]).shape == (batch, 15)
    if batch:
        torch.testing.assert_close(quantized(images[:1]), together[:1], rtol=0, atol=0.02)


def test_a_scheme_with_all_layers_wide_is_the_model(model, seen):
    calibration = quant.calibration_of(model, seen, "int8")
    wide = quant.keep_wide(calibration, calibration.layers, "none")
    images = images_like(model)
    with torch.no_grad():
        torch.testing.assert_close(
            quant.QuantizedSwin(model, wide)(images), model(images), rtol=0, atol=3e-5
        )


def test_magnitudes_beyond_the_range_saturate_and_nan_is_named(model, seen):
    quantized = quant.QuantizedSwin(model, quant.calibration_of(model, seen, "int8"))
    name = "layers.0.blocks.0.mlp.fc2"
    linear = quantized.linears[name]
    x = torch.zeros(2, 96)
    x[0, 3], x[1, 3] = float("inf"), linear.range.input_amax
    y = linear(x)
    assert torch.equal(y[0], y[1])
    x[0, 3] = float("nan")
    with pytest.raises(ValueError, match=f"{name}: its input holds NaN"):
        linear(x)


def as_layer(weight, scheme, x, affine=None):
    """One linear layer after an optional LayerNorm affine, with ranges from ``x``."""
    layer = quant_layers(tiny())["layers.0.blocks.0.mlp.fc1"]
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    norm = None
    if affine is not None:
        norm = torch.nn.LayerNorm(weight.shape[1])
        norm.weight.data = affine
    layer = dataclasses.replace(layer, linear=linear, norm=norm)
    histogram = Histogram()
    histogram.observe(x)
    amax = histogram.amax(scheme.observer, scheme.percentile, scheme.format)
    rows = layer.folded()[0].detach().abs().amax(1)
    if scheme.weight == "per_tensor":
        rows = rows.amax().expand(len(rows))
    return quantize_linear(layer, LayerRange(layer.name, scheme, amax, (), rows))


def row_snr(y, expected):
    """dB per output channel."""
    noise = (y - expected).square().sum(0)
    return 10 * torch.log10(expected.square().sum(0) / noise)


def test_a_weight_row_a_hundred_times_larger_costs_other_rows_nothing_per_channel():
    """SWO-24, weights."""
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(64, 256, generator=generator)
    weight[9] *= 100
    x = torch.randn(1, 49, 256, generator=generator)[0]
    per_channel = row_snr(as_layer(weight, quant.LayerScheme(), x)(x), x @ weight.t())
    per_tensor = row_snr(
        as_layer(weight, quant.LayerScheme(weight="per_tensor"), x)(x), x @ weight.t()
    )
    assert per_channel.min() > 30
    assert per_tensor.median() < 10


@pytest.mark.parametrize("observer", ["max", "percentile", "entropy", "mse"])
def test_an_outlier_channel_of_a_norm_costs_nothing_folded(observer):
    """SWO-24, activation [1, 49, 1024] with channel 7 x500: from the affine, then undone."""
    generator = torch.Generator().manual_seed(9)
    bare = torch.randn(1, 49, 1024, generator=generator)[0]
    weight = torch.randn(32, 1024, generator=generator)
    affine = torch.ones(1024)
    affine[7], weight[:, 7] = 500.0, weight[:, 7] / 500
    expected = (bare * affine) @ weight.t()
    scheme = quant.LayerScheme(observer=observer)
    folded = row_snr(as_layer(weight, scheme, bare, affine)(bare), expected)
    unfolded = row_snr(as_layer(weight, scheme, bare * affine)(bare * affine), expected)
    cosine = F.cosine_similarity(as_layer(weight, scheme, bare, affine)(bare), expected)
    assert folded.min() > 25
    assert unfolded.median() < folded.median() - 8
    assert cosine.min() > 0.99
