"""8-bit graphs: QuantizeLinear and DequantizeLinear around the inputs of linear layers.

    x  ->  Q (per tensor)  ->  DQ  ->  MatMul  <-  DQ (per column)  <-  8-bit weight [K, N]

Symmetric, zero point 0. Runtimes fuse the pattern into an integer (or fp8) product; one that does
not still computes the same numbers. The weight is stored quantised, a quarter of fp32's size.
Everything else keeps the graph's type; scales have it too, as a strongly typed builder wants.

Source of the pattern: ONNX operators QuantizeLinear and DequantizeLinear, opset 19 for fp8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

QdqFormat = Literal["int8", "fp8"]

#: From this opset on ``QuantizeLinear`` states the type it writes.
TYPED_QUANTIZE_OPSET = 21

#: Largest magnitude of a quantised value.
LARGEST: dict[str, float] = {"int8": 127.0, "fp8": 448.0}

#: A scale below fp16's smallest normal number would lose bits in an fp16 graph.
SMALLEST_FP16_SCALE = 2.0**-14


@dataclasses.dataclass(frozen=True)
class LayerQdq:
    """How one linear layer is quantised.

    Attributes:
        input_amax: largest magnitude of the layer's input that is still represented.
        weight_amax: the same for each row of the weight, ``[N]`` as in ``weight [N, K]``.
        format: of input and weight.

    Raises:
        ValueError: a range is not positive and finite, or the format is unknown.
    """

    input_amax: float
    weight_amax: np.ndarray
    format: QdqFormat = "int8"

    def __post_init__(self) -> None:
        if self.format not in LARGEST:
            raise ValueError(f"format must be one of {tuple(LARGEST)}, got {self.format!r}")
        if not (np.isfinite(self.input_amax) and self.input_amax > 0):
            raise ValueError(f"input_amax must be positive and finite, got {self.input_amax}")
        if not (np.isfinite(self.weight_amax).all() and (self.weight_amax >= 0).all()):
            raise ValueError("weight_amax must be finite and not negative in every row")


def layers_of(calibration: Any, query_scale: Mapping[str, float]) -> dict[str, LayerQdq]:
    """A :class:`fastswin.quant.ranges.Calibration` as plain data for the graph's weights.

    Args:
        calibration: ranges of the model whose graph it is; layers kept wide are left out.
        query_scale: layer name to the factor that the graph multiplied into the first third of
            that layer's rows (V1's qkv), whose ranges shrink with it.

    Raises:
        ValueError: a layer asks for per-token inputs, whose scales no constant can hold.
    """
    layers = {}
    for entry in calibration.layers.values():
        if not entry.scheme.quantized:
            continue
        if entry.scheme.activation != "per_tensor":
            raise ValueError(
                f"{entry.name}: Q/DQ graphs need activation='per_tensor', the calibration has "
                f"{entry.scheme.activation!r}"
            )
        amax = entry.weight_amax.numpy().astype(np.float32)
        if entry.name in query_scale:
            amax = amax.copy()
            amax[: len(amax) // 3] *= query_scale[entry.name]
        layers[entry.name] = LayerQdq(entry.input_amax, amax, entry.scheme.format)
    return layers


def insert_qdq(model: Any, layers: Mapping[str, LayerQdq]) -> None:
    """Quantise the products of named layers in place.

    Args:
        model: an ``onnx_ir.Model`` whose weights are called ``<layer>.weight [K, N]``.
        layers: layer name to its ranges.

    Raises:
        ValueError: a layer is not in the graph, its ranges do not fit its weight, or a scale is
            too small for an fp16 graph; the message names the layer.
    """
    import onnx_ir

    graph = model.graph
    for name, layer in layers.items():
        weight = graph.initializers.get(f"{name}.weight")
        if weight is None:
            raise ValueError(f"layer {name!r} of the calibration is not in the graph")
        (product,) = weight.consumers()
        array = weight.const_value.numpy()
        if layer.weight_amax.shape != (array.shape[1],):
            raise ValueError(
                f"{name}: weight_amax must be [{array.shape[1]}], got {layer.weight_amax.shape}"
            )
        input_scale = _scale(np.float32(layer.input_amax), layer.format, array.dtype, name)
        weight_scale = _scale(layer.weight_amax, layer.format, array.dtype, name)
        quantized = quantize_array(array, weight_scale, layer.format)
        zero = np.zeros((), quantized.dtype)

        stored = _initializer(graph, f"{name}.weight_{layer.format}", quantized)
        scales = _initializer(graph, f"{name}.weight_scale", weight_scale)
        zeros = _initializer(graph, f"{name}.weight_zero", np.zeros(len(weight_scale), zero.dtype))
        step = _initializer(graph, f"{name}.input_scale", input_scale)
        origin = _initializer(graph, f"{name}.input_zero", zero)
        nodes = [
            onnx_ir.node("QuantizeLinear", [product.inputs[0], step, origin]),
            onnx_ir.node("DequantizeLinear", [stored, scales, zeros], {"axis": 1}),
        ]
        nodes.insert(1, onnx_ir.node("DequantizeLinear", [nodes[0].outputs[0], step, origin]))
        for node, kind in zip(nodes, ("input_q", "input_dq", "weight_dq"), strict=True):
            node.name = node.outputs[0].name = f"{name}.{kind}"
        graph.insert_before(product, nodes)
        product.replace_input_with(0, nodes[1].outputs[0])
        product.replace_input_with(1, nodes[2].outputs[0])
        del graph.initializers[weight.name]
        if model.opset_imports[""] >= TYPED_QUANTIZE_OPSET:
            _widen_bias(graph, name, product)


def _widen_bias(graph: Any, name: str, product: Any) -> None:
    """Give the bias ``[N]`` that is added to ``product [B, T, N]`` the shape ``[1, 1, N]``.

    ONNX Runtime 1.32 turns a product with a one-dimensional bias into a ``Gemm`` between reshapes
    and repeats the ``QuantizeLinear`` behind the reshape, with its type as an attribute, which that
    node has from opset 21 on. On x86 it then makes inputs unsigned but leaves the attribute, and
    refuses the graph. With this shape the product stays a product and becomes an integer one.
    """
    output = product.outputs[0]
    for node, position in output.uses():
        if node.op_type != "Add" or output.shape is None or len(output.shape) != 3:
            continue
        bias = node.inputs[1 - position]
        if bias.is_initializer() and len(bias.const_value.shape) == 1:
            wide = _initializer(graph, f"{name}.wide_bias", bias.const_value.numpy()[None, None])
            node.replace_input_with(1 - position, wide)
            if not bias.uses():
                del graph.initializers[bias.name]


def quantize_array(array: np.ndarray, scale: np.ndarray, format: QdqFormat) -> np.ndarray:
    """``array [K, N]`` over ``scale [N]``, rounded to even and clipped to the format."""
    scaled = array.astype(np.float32) / scale.astype(np.float32)
    if format == "int8":
        return np.clip(np.rint(scaled), -127, 127).astype(np.int8)
    import ml_dtypes

    return np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def _scale(amax: np.ndarray, format: QdqFormat, dtype: np.dtype, name: str) -> np.ndarray:
    """Steps in the graph's type; a row of zeros has step 1."""
    scale = np.where(amax > 0, amax / LARGEST[format], 1.0)
    if dtype == np.float16 and scale.min() < SMALLEST_FP16_SCALE:
        raise ValueError(
            f"{name}: scale {scale.min():.2g} is below {SMALLEST_FP16_SCALE:.2g}, the smallest "
            "that fp16 holds in full; export with precision='fp32'"
        )
    return scale.astype(dtype)


def _initializer(graph: Any, name: str, array: np.ndarray) -> Any:
    import onnx_ir

    value = onnx_ir.val(name, const_value=onnx_ir.tensor(array, name=name))
    graph.initializers[name] = value
    return value
