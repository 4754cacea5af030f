"""The shipped model on shipped images: post-training accuracy, and the outliers of SWO-24."""

import copy

import pytest
import torch

from fastswin import quant
from fastswin.data.fashion_mnist import fashion_mnist_slice
from fastswin.data.source import open_source
from fastswin.testing.outliers import add_outliers

IMAGES = 128


@pytest.fixture(scope="module")
def source():
    return open_source("swin_fashion_mnist")


@pytest.fixture(scope="module")
def test_images(source):
    pixels, labels = fashion_mnist_slice("test")
    images = source.preprocess(torch.from_numpy(pixels[:IMAGES]))
    with torch.no_grad():
        expected = torch.cat([source.model(part) for part in images.split(64)])
    return images, torch.from_numpy(labels[:IMAGES]).long(), expected


def logits(model, calibration, images):
    quantized = quant.QuantizedSwin(model, calibration)
    return torch.cat([quantized(part) for part in images.split(64)])


def percent(found, truth):
    return 100.0 * float((found.argmax(1) == truth).float().mean())


@pytest.fixture(scope="module")
def seen(source):
    pixels = torch.from_numpy(fashion_mnist_slice("calibration")[0][:64])
    return quant.observe(source.model, source.preprocess(pixels))


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_post_training_loss(source, seen, test_images, name):
    """Ranges of 64 training images; a drop of 0.3 points is less than one of these images."""
    images, labels, expected = test_images
    found = logits(source.model, quant.calibration_of(source.model, seen, name), images)
    assert percent(found, labels) >= percent(expected, labels) - 0.3
    assert percent(found, expected.argmax(1)) >= 99.0  # one image may differ
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.99


def test_mode1_fails_on_outliers_where_mode2_and_the_default_hold(source, test_images):
    images, _, expected = (part[:48] for part in test_images)
    model = copy.deepcopy(source.model)
    add_outliers(model)
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected, rtol=0, atol=2e-3)
    pixels = torch.from_numpy(fashion_mnist_slice("calibration")[0][:16])
    seen = quant.observe(model, source.preprocess(pixels))
    agreement = {}
    for name in ("int8_mode1", "int8_mode2", "int8"):
        found = logits(model, quant.calibration_of(model, seen, name), images)
        agreement[name] = percent(found, expected.argmax(1))
    assert agreement["int8_mode1"] < 75.0
    assert agreement["int8_mode2"] >= 98.0
    assert agreement["int8"] >= 98.0


def test_shipped_ranges_are_those_of_the_shipped_weights(source, seen):
    calibrations = source.calibrations()
    assert set(calibrations) == set(quant.PRESETS)
    for name, shipped in calibrations.items():
        assert (shipped.scheme, shipped.images) == (quant.PRESETS[name], 512)
        fresh = quant.calibration_of(source.model, seen, name)
        for layer, r in shipped.layers.items():  # of 512 images, these are the first 64 of them
            assert r.input_amax == pytest.approx(fresh.layers[layer].input_amax, rel=0.3)
