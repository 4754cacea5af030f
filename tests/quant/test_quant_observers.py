"""Histograms and the ranges read from them, against NumPy; the tensors of SWO-24."""

import numpy as np
import pytest
import torch

from fastswin.quant.observers import Histogram
from fastswin.quant.scheme import LARGEST

METHODS = ("max", "percentile", "entropy", "mse")


def seen(*tensors):
    histogram = Histogram()
    for tensor in tensors:
        histogram.observe(tensor)
    return histogram


def amax(histogram, method, percentile=99.99, format="int8"):
    return histogram.amax(method, percentile, format)


def square_error(x, limit, format="int8"):
    scale = limit / LARGEST[format]
    q = (x / scale).clamp(-LARGEST[format], LARGEST[format])
    q = q.round() if format == "int8" else q.to(torch.float8_e4m3fn).float()
    return float(((q * scale - x) ** 2).sum())


def test_max_is_exact_and_percentile_is_within_one_bin():
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(1)) * 3
    histogram = seen(x)
    assert amax(histogram, "max") == x.abs().max().item()
    for percentile in (90.0, 99.0, 99.99):
        expected = np.percentile(x.abs().numpy(), percentile)
        assert amax(histogram, "percentile", percentile) == pytest.approx(expected, rel=0.008)
    assert amax(histogram, "percentile", 100.0) == x.abs().max().item()


def test_counts_are_64_bit():
    histogram = seen(torch.ones(10))
    histogram.counts *= 2**31  # more than 32 bits hold
    histogram.observe(torch.full((1000,), 2.0))
    assert histogram.total == 10 * 2**31 + 1000
    assert amax(histogram, "percentile", 99.9) == pytest.approx(1.0, rel=0.004)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_mse_is_no_worse_than_any_other_range(format):
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(2))
    x[::1000] *= 8
    found = square_error(x, amax(seen(x), "mse", format=format), format)
    for share in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
        assert found <= square_error(x, share * x.abs().max().item(), format) * 1.01


def test_order_and_sharing_do_not_matter():
    parts = torch.randn(6, 5000, generator=torch.Generator().manual_seed(3)).unbind()
    forward, backward = seen(*parts), seen(*reversed(parts))
    shared = seen(*parts[:1])
    shared.merge(seen(*parts[1:]))
    for method in METHODS:
        assert amax(forward, method) == amax(backward, method) == amax(shared, method)
    assert torch.equal(forward.counts, shared.counts)


def test_half_precision_counts_as_its_float_values():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(4))
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(seen(x.to(dtype)).counts, seen(x.to(dtype).float()).counts)


@pytest.mark.parametrize("method", METHODS)
def test_zero_and_constant_tensors(method):
    assert amax(seen(torch.zeros(3, 5), -torch.zeros(2)), method) == 0.0
    constant = amax(seen(torch.full((1000,), -2.5)), method)
    assert constant == pytest.approx(2.5, rel=0.01)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_is_refused(method, bad):
    histogram = seen(torch.tensor([1.0, bad, -3.0]))
    assert histogram.largest == 3.0
    assert histogram.non_finite == 1
    with pytest.raises(ValueError, match="1 values that are NaN or infinite"):
        amax(histogram, method)


def test_nothing_seen_is_refused():
    with pytest.raises(ValueError, match="saw no values"):
        amax(seen(torch.empty(0)), "max")


def test_one_extreme_value_of_a_gelu_output():
    """SWO-24: a long positive tail with one 60 in 200,000; max wastes 4 of 7 bits on it."""
    x = torch.nn.functional.gelu(torch.randn(200_000, generator=torch.Generator().manual_seed(5)))
    x[77] = 60.0
    ordinary = x[x < 59]
    limits = {method: amax(seen(x), method) for method in METHODS}
    assert limits["max"] == 60.0
    for method in ("percentile", "entropy"):
        assert limits[method] < 8.0
        assert square_error(ordinary, limits[method]) < 0.1 * square_error(ordinary, 60.0)
    assert square_error(x, limits["mse"]) < square_error(x, 60.0)


def test_softmax_output_uses_its_whole_range():
    x = torch.randn(4, 100, 49, generator=torch.Generator().manual_seed(6)).mul(2).softmax(-1)
    for method in METHODS:
        assert 0 < amax(seen(x), method) <= 1.0
