"""The graph in OpenVINO's operators, compiled for this CPU.

LayerNorm is MVN, attention is MatMul, Add, Softmax, MatMul over transposed views, which OpenVINO
fuses into one kernel where it can. An int8 product is FakeQuantize before and converted int8
weights behind: OpenVINO turns the pair into an integer product and fuses the quantisation into
whatever wrote the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastswin.engine.backends.layers import Array, Attention, Linear
from fastswin.ops.window_attention.reference import COSINE_EPS

Program = Callable[[Array], list[Array]]


class OpenVinoEmitter:
    """See :class:`fastswin.engine.backends.graph.Emitter`.

    Args:
        saturating: whether this CPU adds pairs of 8-bit products in 16 bits.
    """

    qkv_products = 1

    def __init__(self, *, saturating: bool) -> None:
        import openvino.opset13 as op

        self.saturating = saturating
        self.op: Any = op
        self.input: Any = None

    def constant(self, values: Any) -> Any:
        array = np.asarray(values)
        return self.op.constant(array if array.ndim == 0 else np.ascontiguousarray(array))

    def images(self, shape: tuple[int, int, int, int]) -> Any:
        self.input = self.op.parameter(list(shape), np.float32, name="images")
        return self.input

    def patches(self, images: Any, weight: Array, bias: Array) -> Any:
        B, _, h, w = images.get_output_shape(0)
        C, _, rows, cols = weight.shape
        x = self.op.convolution(images, self.constant(weight), [rows, cols], [0, 0], [0, 0], [1, 1])
        x = self.op.add(x, self.constant(bias.reshape(1, -1, 1, 1)))
        x = self.transpose(x, (0, 2, 3, 1))
        return self.reshape(x, (B, (h // rows) * (w // cols), C))

    def linear(self, x: Any, layer: Linear) -> Any:
        if layer.quantized:
            assert layer.input_scale is not None
            most = self.constant(np.float32(127 * layer.input_scale))
            least = self.constant(np.float32(-127 * layer.input_scale))
            x = self.op.fake_quantize(x, least, most, least, most, 255)
            numbers, steps = layer.quantized_weight(saturating=self.saturating)
            weight = self.op.convert(self.constant(numbers), np.float32)
            weight = self.op.multiply(weight, self.constant(steps[:, None]))
        else:
            weight = self.constant(layer.weight)
        y = self.op.matmul(x, weight, False, True)
        return y if layer.bias is None else self.add(y, self.like_rows(layer.bias, y))

    def layer_norm(
        self, x: Any, eps: float, channels: int, affine: tuple[Array, Array] | None
    ) -> Any:
        del channels  # the shape of x tells it
        x = self.op.mvn(x, self.constant(np.array([-1])), True, float(eps), "INSIDE_SQRT")
        if affine is None:
            return x
        weight, bias = (self.constant(self.like_rows(a, x)) for a in affine)
        return self.op.add(self.op.multiply(x, weight), bias)

    @staticmethod
    def like_rows(values: Array, x: Any) -> Array:
        """``[C]`` with the rank of ``x``; OpenVINO fuses constants of equal rank only."""
        return values.reshape((1,) * (len(x.get_output_shape(0)) - 1) + (-1,))

    def add(self, x: Any, y: Any) -> Any:
        return self.op.add(x, self.constant(y) if isinstance(y, np.ndarray) else y)

    def gelu(self, x: Any) -> Any:
        return self.op.gelu(x, "erf")

    def gather(self, x: Any, index: Array) -> Any:
        return self.op.gather(x, self.constant(index.astype(np.int32)), self.constant(np.int64(1)))

    def blank(self, x: Any, keep: Array, fill: Array) -> Any:
        keep, fill = keep.reshape(1, -1, 1), fill.reshape(1, 1, -1)
        return self.op.select(self.constant(keep), x, self.constant(fill))

    def reshape(self, x: Any, shape: tuple[int, ...]) -> Any:
        return self.op.reshape(x, self.constant(np.array(shape, np.int64)), False)

    def transpose(self, x: Any, order: tuple[int, ...]) -> Any:
        return self.op.transpose(x, self.constant(np.array(order, np.int64)))

    def attention(self, qkv: Sequence[Any], spec: Attention) -> Any:
        split = (spec.windows, spec.tokens, 3 * spec.heads, spec.head_dim)
        (x,) = (self.reshape(part, split) for part in qkv)
        q, k, v = self.op.split(x, self.constant(np.int64(2)), 3).outputs()
        if spec.temperature is not None:
            q = self.op.multiply(
                self.normalize(q), self.constant(spec.temperature.reshape(1, 1, -1, 1))
            )
            k = self.normalize(k)
        scores = self.op.matmul(
            self.transpose(q, (0, 2, 1, 3)), self.transpose(k, (0, 2, 3, 1)), False, False
        )
        for bias in spec.bias:
            scores = self.add(scores, bias)
        out = self.op.matmul(
            self.op.softmax(scores, -1), self.transpose(v, (0, 2, 1, 3)), False, False
        )
        return self.reshape(
            self.transpose(out, (0, 2, 1, 3)),
            (spec.windows, spec.tokens, spec.heads * spec.head_dim),
        )

    def normalize(self, x: Any) -> Any:
        """``x / max(norm(x), eps)`` over the last axis."""
        axis = self.constant(np.array([-1], np.int64))
        return self.op.normalize_l2(x, axis, COSINE_EPS**2, "max")

    def mean(self, x: Any) -> Any:
        return self.op.reduce_mean(x, self.constant(np.array([1], np.int64)), False)


class OpenVino:
    """Compiles graphs for the CPU.

    Args:
        threads: worker threads.
        bf16: compute in bf16; the CPU must have instructions for it.
        saturating: see :class:`OpenVinoEmitter`.
    """

    name = "openvino"

    def __init__(self, threads: int, *, bf16: bool, saturating: bool) -> None:
        import openvino

        self._openvino: Any = openvino
        self._saturating = saturating
        self._core: Any = openvino.Core()
        self._properties = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "bf16" if bf16 else "f32",
            # pinned threads of two processes on one core would wait for each other
            "ENABLE_CPU_PINNING": False,
        }

    def emitter(self) -> OpenVinoEmitter:
        return OpenVinoEmitter(saturating=self._saturating)

    def compile(self, emitter: OpenVinoEmitter, outputs: list[Any]) -> Program:
        """A function from float32 images to float32 arrays, which the next call overwrites."""
        model = self._openvino.Model(outputs, [emitter.input], "swin")
        compiled = self._core.compile_model(model, "CPU", self._properties)
        request = compiled.create_infer_request()
        count = len(outputs)

        def run(images: Array) -> list[Array]:
            request.set_input_tensor(self._openvino.Tensor(images, shared_memory=True))
            request.infer()
            return [request.get_output_tensor(i).data for i in range(count)]

        return run
