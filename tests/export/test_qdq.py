"""8-bit graphs against numbers of our own and against the calibrated emulation."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from onnx import numpy_helper
from onnx_cases import SIZE, images
from swin_references import our_model

from fastswin.export.onnx import export_onnx
from fastswin.export.parity import open_session
from fastswin.export.qdq import LayerQdq, insert_qdq, quantize_array
from fastswin.quant.calibrate import calibrate
from fastswin.quant.convert import QuantizedSwin
from fastswin.quant.scheme import LayerScheme, Scheme


def one_product(weight: np.ndarray) -> onnx_ir.Model:
    """``y = x @ fc.weight`` as a graph."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]>
        g (float[2, {weight.shape[0]}] images) => (float[2, {weight.shape[1]}] y)
        {{ y = MatMul (images, weight) }}"""
    )
    model.graph.initializer.append(numpy_helper.from_array(weight, "fc.weight"))
    model.graph.node[0].input[1] = "fc.weight"
    return onnx_ir.serde.deserialize_model(model)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_product_is_that_of_the_rounded_operands(tmp_path, format):
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(16, 5)).astype(np.float32)
    weight[:, 3] = 0.0  # a row of zeros must not divide by zero
    x = rng.normal(size=(2, 16)).astype(np.float32)
    x = x.clip(-1.9, 1.9)
    x[0, 0] = 9.0  # beyond the range: saturates
    model = one_product(weight)
    amax = abs(weight).max(0)
    insert_qdq(model, {"fc": LayerQdq(2.0, amax, format)})
    onnx_ir.save(model, tmp_path / "q.onnx")
    session = open_session(tmp_path / "q.onnx", folded=False)
    (actual,) = session.run(None, {"images": x})
    largest = {"int8": 127.0, "fp8": 448.0}[format]
    step = np.float32(2.0 / largest)
    steps = np.where(amax > 0, amax / largest, 1.0).astype(np.float32)
    if format == "int8":
        rounded_x = np.clip(np.rint(x / step), -128, 127) * step  # ONNX clips to the whole type
    else:
        rounded_x = quantize_array(x, np.full(16, step), format).astype(np.float32) * step
    rounded_w = quantize_array(weight, steps, format).astype(np.float32) * steps
    np.testing.assert_allclose(actual, rounded_x @ rounded_w, rtol=1e-5, atol=1e-5)
    assert rounded_x[0, 0] == pytest.approx(2.0)
    assert abs(actual - x @ weight)[1].max() < 0.2
    (stored,) = (t for t in onnx.load(tmp_path / "q.onnx").graph.initializer if t.dims == [16, 5])
    assert len(stored.raw_data) == 16 * 5  # one byte a weight


@pytest.mark.parametrize(
    ("name", "layer", "message"),
    [
        ("fc9", LayerQdq(1.0, np.ones(5)), "layer 'fc9' of the calibration is not in the graph"),
        ("fc", LayerQdq(1.0, np.ones(4)), r"fc: weight_amax must be \[5\]"),
    ],
    ids=["unknown-layer", "wrong-width"],
)
def test_ranges_that_do_not_fit_are_named(name, layer, message):
    model = one_product(np.ones((16, 5), np.float32))
    with pytest.raises(ValueError, match=message):
        insert_qdq(model, {name: layer})


@pytest.mark.parametrize("amax", [0.0, -1.0, np.nan, np.inf])
def test_ranges_must_be_positive(amax):
    with pytest.raises(ValueError, match="input_amax must be positive and finite"):
        LayerQdq(amax, np.ones(3))


def test_scale_too_small_for_fp16_is_refused():
    model = one_product(np.ones((16, 5), np.float16))
    with pytest.raises(ValueError, match=r"fc: scale 7\.9e-06 is below 6\.1e-05"):
        insert_qdq(model, {"fc": LayerQdq(1e-3, np.ones(5))})


@pytest.mark.parametrize(
    ("version", "scheme", "precision"),
    [(1, "int8", "fp32"), (2, "fp8", "fp16")],
    ids=["v1-int8-in-fp32", "v2-fp8-in-fp16"],
)
def test_calibrated_graph_is_the_emulation(tmp_path, version, scheme, precision):
    model = our_model(version, image_size=SIZE, depths=(2, 1))  # padded maps, norms to fold
    # what the graph holds: wide outputs, and no range that saturates (ONNX has -128, we have not)
    layer = LayerScheme(format=scheme, observer="max")
    calibration = calibrate(model, images(16), Scheme("wide", *[layer] * 5))
    report = export_onnx(model, tmp_path / "q.onnx", calibration=calibration, precision=precision)
    layers = len(calibration.layers)
    assert report.op_counts["QuantizeLinear"] == layers
    assert report.op_counts["DequantizeLinear"] == 2 * layers
    x = images(6)
    emulated = QuantizedSwin(model, calibration)(x).numpy()
    (actual,) = open_session(report.path).run(None, {"images": x.numpy()})
    with torch.no_grad():
        exact = model(x).numpy()
    if precision == "fp32":
        # a value on the edge of a step may round either way, which moves logits less than the
        # quantisation itself does
        assert abs(actual - emulated).max() < 0.5 * abs(emulated - exact).max()
    assert abs(actual - exact).max() < 1.5 * abs(emulated - exact).max()
    assert report.parity.max_abs_diff <= report.parity.bound
