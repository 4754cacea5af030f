"""The graph in ONNX operators, run by ONNX Runtime on this CPU.

Standard operators of opset 20, but for int8 products: those are ONNX Runtime's own
``MatMulIntegerToFloat``, so that nothing depends on which patterns of Q/DQ pairs it recognises.
Inputs are unsigned with zero at 128, the form its kernels are fast in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastswin.engine.backends.layers import Array, Attention, Linear
from fastswin.ops.window_attention.reference import COSINE_EPS

Program = Callable[[Array], list[Array]]

OPSET, IR_VERSION = 20, 9


class OnnxEmitter:
    """See :class:`fastswin.engine.backends.graph.Emitter`.

    q, k and v are three products, which costs less than one and a ``Split`` that copies its result:
    4.8 against 5.6 ms for the attention of Swin-T's first stage on one core with AVX2.

    Args:
        saturating: whether this CPU adds pairs of 8-bit products in 16 bits.
    """

    qkv_products = 3

    def __init__(self, *, saturating: bool) -> None:
        from onnx import TensorProto, helper, numpy_helper

        self._helper: Any = helper
        self._from_array: Any = numpy_helper.from_array
        self._float: Any = TensorProto.FLOAT
        self.saturating = saturating
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.input: Any = None
        self.shape: tuple[int, ...] = ()
        self._quantized: dict[tuple[str, float], tuple[str, str, str]] = {}

    def constant(self, values: Any) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(self._from_array(np.asarray(values), name))
        return name

    def node(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        at = len(self.nodes)
        names = [f"value_{at}_{i}" for i in range(outputs)]
        made = self._helper.make_node(kind, inputs, names, f"{kind}_{at}", **attributes)
        self.nodes.append(made)
        return names[0] if outputs == 1 else names

    def images(self, shape: tuple[int, int, int, int]) -> str:
        self.shape = shape
        self.input = self._helper.make_tensor_value_info("images", self._float, shape)
        return "images"

    def patches(self, images: str, weight: Array, bias: Array) -> str:
        C, patch = weight.shape[0], list(weight.shape[2:])
        x = self.node(
            "Conv", images, self.constant(weight), self.constant(bias), kernel_shape=patch,
            strides=patch,
        )  # fmt: skip
        tokens = (self.shape[2] // patch[0]) * (self.shape[3] // patch[1])
        return self.node("Transpose", self.reshape(x, (self.shape[0], C, tokens)), perm=[0, 2, 1])

    def linear(self, x: str, layer: Linear) -> str:
        bias = [] if layer.bias is None else [self.constant(layer.bias)]
        if layer.quantized:
            return self.int8_linear(x, layer, bias)
        y = self.node("MatMul", x, self.constant(np.ascontiguousarray(layer.weight.T)))
        return self.node("Add", y, *bias) if bias else y

    def int8_linear(self, x: str, layer: Linear, bias: list[str]) -> str:
        assert layer.input_scale is not None
        weight, steps = layer.quantized_weight(saturating=self.saturating)
        quantized, scale, zero = self.quantize(x, layer.input_scale)
        operands = [
            quantized,
            self.constant(np.ascontiguousarray(weight.T)),
            scale,
            self.constant(steps),
            zero,
            "",  # the weight's zero point: 0
            *bias,
        ]
        return self.node("MatMulIntegerToFloat", *operands, domain="com.microsoft")

    def quantize(self, x: str, step: float) -> tuple[str, str, str]:
        """``x`` in 8 bits, its step and its zero point; once for products that share an input."""
        if (x, step) not in self._quantized:
            scale, zero = self.constant(np.float32(step)), self.constant(np.uint8(128))
            self._quantized[x, step] = self.node("QuantizeLinear", x, scale, zero), scale, zero
        return self._quantized[x, step]

    def layer_norm(
        self, x: str, eps: float, channels: int, affine: tuple[Array, Array] | None
    ) -> str:
        if affine is None:  # the operator has no form without a weight; one of a single element,
            # which it would broadcast, makes it 2.5 times as slow
            affine = np.ones(channels, np.float32), np.zeros(channels, np.float32)
        weight, bias = (self.constant(a) for a in affine)
        return self.node("LayerNormalization", x, weight, bias, axis=-1, epsilon=float(eps))

    def add(self, x: str, y: str | Array) -> str:
        return self.node("Add", x, self.constant(y) if isinstance(y, np.ndarray) else y)

    def gelu(self, x: str) -> str:
        return self.node("Gelu", x)

    def gather(self, x: str, index: Array) -> str:
        return self.node("Gather", x, self.constant(index.astype(np.int64)), axis=1)

    def blank(self, x: str, keep: Array, fill: Array) -> str:
        return self.node("Where", self.constant(keep.reshape(1, -1, 1)), x, self.constant(fill))

    def reshape(self, x: str, shape: tuple[int, ...]) -> str:
        return self.node("Reshape", x, self.constant(np.array(shape, np.int64)))

    def attention(self, qkv: Sequence[str], spec: Attention) -> str:
        heads = (spec.windows, spec.tokens, spec.heads, spec.head_dim)
        q, k, v = (self.reshape(part, heads) for part in qkv)
        if spec.temperature is not None:
            temperature = self.constant(spec.temperature.reshape(1, 1, -1, 1))
            q = self.node("Mul", self.normalize(q), temperature)
            k = self.normalize(k)
        scores = self.node(
            "MatMul",
            self.node("Transpose", q, perm=[0, 2, 1, 3]),
            self.node("Transpose", k, perm=[0, 2, 3, 1]),
        )
        for bias in spec.bias:
            scores = self.add(scores, bias)
        out = self.node(
            "MatMul",
            self.node("Softmax", scores, axis=-1),
            self.node("Transpose", v, perm=[0, 2, 1, 3]),
        )
        out = self.node("Transpose", out, perm=[0, 2, 1, 3])
        return self.reshape(out, (spec.windows, spec.tokens, spec.heads * spec.head_dim))

    def normalize(self, x: str) -> str:
        """``x / max(norm(x), eps)`` over the last axis."""
        axis = self.constant(np.array([-1], np.int64))
        norm = self.node("ReduceL2", x, axis, keepdims=1)
        return self.node("Div", x, self.node("Max", norm, self.constant(np.float32(COSINE_EPS))))

    def mean(self, x: str) -> str:
        return self.node("ReduceMean", x, self.constant(np.array([1], np.int64)), keepdims=0)

    def model(self, outputs: list[str]) -> Any:
        """The finished ``onnx.ModelProto``."""
        helper = self._helper
        infos = [helper.make_tensor_value_info(name, self._float, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "swin", [self.input], infos, self.constants)
        versions = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=versions, ir_version=IR_VERSION)


class OnnxRuntime:
    """Makes sessions for the CPU.

    Args:
        threads: worker threads.
        saturating: see :class:`OnnxEmitter`.
    """

    name = "onnxruntime"

    def __init__(self, threads: int, *, saturating: bool) -> None:
        import onnxruntime

        self._onnxruntime: Any = onnxruntime
        self._threads, self._saturating = threads, saturating

    def emitter(self) -> OnnxEmitter:
        return OnnxEmitter(saturating=self._saturating)

    def compile(self, emitter: OnnxEmitter, outputs: list[str]) -> Program:
        """A function from float32 images to float32 arrays."""
        options = self._onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.log_severity_level = 3  # errors only
        session = self._onnxruntime.InferenceSession(
            emitter.model(outputs).SerializeToString(), options,
            providers=["CPUExecutionProvider"],
        )  # fmt: skip

        def run(images: Array) -> list[Array]:
            return session.run(outputs, {"images": images})

        return run
