"""``fastswin::WindowAttention``: a block's window attention as one ONNX node, for a plugin.

    inputs      qkv          [B, H, W, 3C]   image order, fp32 or fp16, V1's scale not applied
                bias         [nH, N, N]      fp32, dense relative position bias
                temperature  [nH]            fp32, V2 only: exp(min(logit_scale, ln 100))
                qkv_bias     [3C]            qkv's dtype, only where the map is padded: the qkv of
                                             a padded token
    output      [B, H, W, C] in qkv's dtype
    attributes  num_heads (int), window_size (ints), shift_size (ints), scale (float; 1 in V2)

Shift, partition, padding, shift mask (-100) and their inverses are part of the operator, as in
:func:`fastswin.ops.window_attention`. ``temperature`` may be absent with ``qkv_bias`` present: its
name is then empty, as ONNX writes a missing optional input.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fastswin.models.window_order import place_of, window_order
from fastswin.ops.window_attention.geometry import num_windows, shift_attention_mask
from fastswin.ops.window_attention.reference import COSINE_EPS

Pair = tuple[int, int]

DOMAIN = "fastswin"
OP_TYPE = "WindowAttention"
OP_VERSION = 1


def window_attention_node(
    qkv: torch.Tensor,
    bias: torch.Tensor,
    temperature: torch.Tensor | None,
    qkv_bias: torch.Tensor | None,
    *,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    scale: float,
) -> torch.Tensor:
    """The node while PyTorch's exporter traces; outside of it the result holds no values.

    Args:
        qkv: ``[B, H, W, 3C]``.
        bias: ``[nH, N, N]`` fp32.
        temperature: ``[nH]`` fp32 in V2, None in V1.
        qkv_bias: ``[3C]``, None where the map is a multiple of the window.
        num_heads: ``nH``.
        window_size: ``(Wh, Ww)`` in tokens.
        shift_size: ``(Sh, Sw)`` in tokens.
        scale: factor on ``q @ k.T``.

    Returns:
        ``[B, H, W, C]``.
    """
    inputs: list[torch.Tensor | None] = [qkv, bias, temperature, qkv_bias]
    while inputs[-1] is None:
        inputs.pop()
    B, H, W, channels = qkv.shape
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{OP_TYPE}",
        inputs,
        {
            "num_heads": num_heads,
            "window_size": list(window_size),
            "shift_size": list(shift_size),
            "scale": float(scale),
        },
        dtype=qkv.dtype,
        shape=(B, H, W, channels // 3),
        version=OP_VERSION,
    )


def expand_window_attention(model: Any) -> Any:
    """The same model with every ``fastswin::WindowAttention`` written in standard operators.

    For runtimes without a plugin, and for the parity check, which thereby tests each node's
    inputs and attributes.

    Args:
        model: an ``onnx.ModelProto`` whose nodes' qkv have a known map size; not modified.

    Returns:
        A new ``onnx.ModelProto``.

    Raises:
        ValueError: the map size of a node is unknown.
    """
    import onnx

    expanded = onnx.ModelProto()
    expanded.CopyFrom(model)
    graph = expanded.graph
    types = {value.name: value.type.tensor_type for value in graph.value_info}
    nodes: list[Any] = []
    for node in graph.node:
        if (node.domain, node.op_type) != (DOMAIN, OP_TYPE):
            nodes.append(node)
            continue
        sides = [dim.dim_value for dim in types[node.input[0]].shape.dim]
        if min(sides[1:]) < 1:
            raise ValueError(f"node {node.name}: the map size of {node.input[0]} is unknown")
        body = _Body(node, types[node.input[0]].elem_type)
        body.write((sides[1], sides[2]), sides[3] // 3)
        nodes += body.nodes
        graph.initializer.extend(body.constants)
    del graph.node[:]
    graph.node.extend(nodes)
    kept = [opset for opset in expanded.opset_import if opset.domain != DOMAIN]
    del expanded.opset_import[:]
    expanded.opset_import.extend(kept)
    return expanded


class _Body:
    """Writes one node's standard operators."""

    def __init__(self, node: Any, elem_type: int) -> None:
        from onnx import helper

        self.node, self.elem_type = node, elem_type
        self.attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def add(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Append a node and return its output's name, or names."""
        from onnx import helper

        names = [f"{self.node.output[0]}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, values: Any, dtype: Any = np.int64) -> str:
        """Append an initializer and return its name."""
        from onnx import numpy_helper

        name = f"{self.node.output[0]}_c{len(self.constants)}"
        array = np.ascontiguousarray(values, dtype=dtype)
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def cast(self, name: str, elem_type: int) -> str:
        """Cast to another element type."""
        return self.add("Cast", name, to=elem_type)

    def write(self, map_size: Pair, channels: int) -> None:
        """``qkv`` to the output; see the module for the inputs."""
        from onnx import TensorProto, helper

        qkv, bias, temperature, qkv_bias = (*self.node.input, "", "")[:4]
        window, shift = tuple(self.attributes["window_size"]), tuple(self.attributes["shift_size"])
        heads, tokens = self.attributes["num_heads"], window[0] * window[1]
        windows = int(np.prod(num_windows(map_size, window)))
        order = window_order(map_size, window, shift)
        x = self.add("Reshape", qkv, self.constant([-1, map_size[0] * map_size[1], 3 * channels]))
        x = self.add("Gather", x, self.constant(order.clamp(min=0)), axis=1)
        if (order < 0).any():
            keep = self.constant((order >= 0)[:, None], bool)
            zero = self.cast(self.constant(0.0, np.float32), self.elem_type)
            x = self.add("Where", keep, x, qkv_bias or zero)
        split = self.constant([-1, windows, tokens, heads, channels // heads])
        q, k, v = (
            self.add("Transpose", self.add("Reshape", part, split), perm=(0, 1, 3, 2, 4))
            for part in self.add("Split", x, outputs=3, axis=2, num_outputs=3)
        )
        q, k = (self.cast(part, TensorProto.FLOAT) for part in (q, k))
        if temperature:
            q, k = self._unit(q), self._unit(k)
            column = self.add("Reshape", temperature, self.constant([heads, 1, 1]))
            q = self.add("Mul", q, column)
        scale = self.constant(self.attributes["scale"], np.float32)
        k = self.add("Transpose", k, perm=(0, 1, 2, 4, 3))
        scores = self.add("MatMul", self.add("Mul", q, scale), k)
        scores = self.add("Add", scores, bias)
        if any(shift):
            mask = shift_attention_mask(map_size, window, shift)[:, None]
            scores = self.add("Add", scores, self.constant(mask, np.float32))
        probs = self.cast(self.add("Softmax", scores, axis=-1), self.elem_type)
        out = self.add("Transpose", self.add("MatMul", probs, v), perm=(0, 1, 3, 2, 4))
        out = self.add("Reshape", out, self.constant([-1, windows * tokens, channels]))
        out = self.add("Gather", out, self.constant(place_of(order)), axis=1)
        shape = self.constant([-1, *map_size, channels])
        self.nodes.append(helper.make_node("Reshape", [out, shape], [self.node.output[0]]))

    def _unit(self, x: str) -> str:
        norm = self.add("ReduceL2", x, self.constant([-1]), keepdims=1)
        return self.add("Div", x, self.add("Clip", norm, self.constant(COSINE_EPS, np.float32)))
