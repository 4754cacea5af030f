"""ONNX files with our attention nodes, rewritten for the plugins.

Each ``fastswin::WindowAttention`` (attention_op.py) becomes a ``PackedWindowAttention``: its bias
and temperature, which are constants, are packed as the kernel reads them (packing.py), every input
is there, and its attributes are the plugin's. ``plugin_version``, ``plugin_namespace`` and ``aot``
are what TensorRT's parser looks for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastswin.export.attention_op import DOMAIN, OP_TYPE
from fastswin.export.plugin import LAYER_NORM, NAMESPACE, WINDOW_ATTENTION
from fastswin.ops.window_attention.packing import LOG2_E, pack_bias

#: Attributes that select a plugin and its ahead-of-time form.
PARSER_ATTRIBUTES: dict[str, Any] = {"plugin_version": "1", "plugin_namespace": NAMESPACE, "aot": 1}

#: Largest |bias * log2(e)| stored in fp16; beyond it tables stay fp32 (as in engine/prepared.py).
FP16_BIAS_LIMIT = 1.0e4


def has_attention_nodes(path: str | os.PathLike) -> bool:
    """Whether an ONNX file holds ``fastswin::WindowAttention``; weights are not read."""
    model = _load(Path(path))
    return any((n.domain, n.op_type) == (DOMAIN, OP_TYPE) for n in model.graph.node)


def plugin_model(
    path: str | os.PathLike,
    *,
    capability: int,
    multiprocessors: int = 0,
    layer_norms: bool = False,
) -> tuple[bytes, int]:
    """A file's graph with plugin nodes, for ``OnnxParser.parse``.

    Args:
        path: the ``.onnx`` file; external weights are neither read nor moved.
        capability: compute capability that the kernels are compiled for, 86 for 8.6.
        multiprocessors: of the card; 0 takes a common one's.
        layer_norms: replace ``LayerNormalization`` over the last axis as well; TensorRT fuses its
            own with what stands around it, so this pays only where a measurement says so.

    Returns:
        The serialised model, and how many plugin nodes it holds.

    Raises:
        ValueError: not an ONNX file, or an attention node's constants are not in it.
        ImportError: the package onnx is missing.
    """
    model = _load(Path(path))
    rewriter = _Rewriter(model, Path(path).parent)
    nodes, count = [], 0
    for node in model.graph.node:
        replaced = None
        if (node.domain, node.op_type) == (DOMAIN, OP_TYPE):
            replaced = rewriter.attention(node, capability, multiprocessors)
        elif (
            layer_norms and node.domain in ("", "ai.onnx") and node.op_type == "LayerNormalization"
        ):
            replaced = rewriter.layer_norm(node, capability)
        nodes.append(node if replaced is None else replaced)
        count += replaced is not None
    kept = [_copy(node) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model.SerializeToString(), count


class _Rewriter:
    """Makes plugin nodes and adds their constants to the graph."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.graph, self.folder = model.graph, folder
        self.initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        values = [*model.graph.value_info, *model.graph.input, *model.graph.output]
        self.types = {value.name: value.type.tensor_type for value in values}

    def attention(self, node: Any, capability: int, multiprocessors: int) -> Any:
        from onnx import TensorProto, helper

        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        qkv, bias_name, temperature, qkv_bias = (*node.input, "", "")[:4]
        heads = given["num_heads"]
        window, shift = tuple(given["window_size"]), tuple(given["shift_size"])
        bias = torch.from_numpy(self.constant(bias_name, node).copy())
        packed = pack_bias(bias, heads, window, shift, bias.device)
        half = self.types[qkv].elem_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16)
        fits = packed[packed.isfinite()].abs().max().item() < FP16_BIAS_LIMIT
        if half and fits and not temperature:
            packed = packed.half()
        if temperature:
            head_scale = self.constant(temperature, node).astype(np.float32) * LOG2_E
        else:
            head_scale = np.full(heads, given["scale"] * LOG2_E)
        channels = self.types[qkv].shape.dim[3].dim_value
        pad = self.constant(qkv_bias, node) if qkv_bias else np.zeros(channels)
        inputs = [
            qkv,
            self.add(f"{node.output[0]}_bias", packed.numpy()),
            self.add(f"{node.output[0]}_head_scale", head_scale.astype(np.float32)),
            self.add(f"{node.output[0]}_qkv_bias", pad.astype(np.float32)),
        ]
        return helper.make_node(
            WINDOW_ATTENTION, inputs, list(node.output), name=node.name, domain=NAMESPACE,
            num_heads=heads, window_height=window[0], window_width=window[1],
            shift_height=shift[0], shift_width=shift[1], cosine=int(bool(temperature)),
            capability=capability, multiprocessors=multiprocessors, **PARSER_ATTRIBUTES,
        )  # fmt: skip

    def layer_norm(self, node: Any, capability: int) -> Any:
        from onnx import helper

        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if given.get("axis", -1) != -1 or len(node.output) > 1 or len(node.input) < 3:
            return None
        eps = np.full(1, given.get("epsilon", 1e-5), np.float32)
        inputs = [*node.input, self.add(f"{node.output[0]}_eps", eps)]
        return helper.make_node(
            LAYER_NORM, inputs, list(node.output), name=node.name, domain=NAMESPACE,
            capability=capability, **PARSER_ATTRIBUTES,
        )  # fmt: skip

    def constant(self, name: str, node: Any) -> np.ndarray:
        from onnx import numpy_helper

        if name not in self.initializers:
            raise ValueError(f"node {node.name}: input {name} is not a constant of the file")
        return numpy_helper.to_array(self.initializers[name], str(self.folder))

    def add(self, name: str, values: np.ndarray) -> str:
        from onnx import numpy_helper

        self.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name


def _load(path: Path) -> Any:
    """A model without its external weights."""
    try:
        import onnx
    except ImportError as error:
        raise ImportError(
            "reading ONNX files needs onnx: pip install 'fastswin[export]'"
        ) from error
    from google.protobuf.message import DecodeError

    try:
        return onnx.load(str(path), load_external_data=False)
    except DecodeError as error:
        raise ValueError(f"{path.name} is no ONNX file: {error}") from error


def _copy(node: Any) -> Any:
    """A node that outlives its graph's list."""
    from onnx import NodeProto

    copied = NodeProto()
    copied.CopyFrom(node)
    return copied
