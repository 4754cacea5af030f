"""Window attention and LayerNorm inside a TensorRT engine, as quickly deployable plugins.

    fastswin::PackedWindowAttention (qkv [B, H, W, 3C], bias [kinds, nH, NP, NP], head_scale [nH],
                                qkv_bias [3C]) -> [B, H, W, C]
    fastswin::LayerNorm        (x [..., C], weight [C], bias [C], eps [1]) -> [..., C]

``bias`` and ``head_scale`` are packed as for the PyTorch operator (ops/window_attention/packing.py;
for V1 every element of ``head_scale`` is ``scale * log2(e)``). Attributes are integers; floats come
as tensors, because the scalars of a launch are 32-bit integers. The kernels are compiled ahead of
time: the engine holds their PTX and launches it without Python.

``tensorrt.plugin`` came with TensorRT 10.7; ahead-of-time implementations with 10.9. TensorRT-RTX
takes no plugins. Source: NVIDIA TensorRT documentation, "Extending TensorRT with custom layers",
and the ``tensorrt.plugin`` package itself.
"""

# No ``from __future__ import annotations``: tensorrt.plugin reads the annotations of the functions
# below as types.

import math
from typing import Any

from fastswin.export.plugin_launch import (
    AttentionLayer,
    LayerNormLayer,
    compile_attention,
    compile_layer_norm,
)
from fastswin.ops.window_attention.launch import check_grid

NAMESPACE = "fastswin"
WINDOW_ATTENTION = "PackedWindowAttention"
LAYER_NORM = "LayerNorm"

#: Attributes of each plugin in order, all integers.
WINDOW_ATTENTION_ATTRIBUTES = (
    "num_heads", "window_height", "window_width", "shift_height", "shift_width", "cosine",
    "capability", "multiprocessors",
)  # fmt: skip
LAYER_NORM_ATTRIBUTES = ("capability",)


def register_plugins() -> None:
    """Register both plugins with the installed TensorRT; again is no error.

    Raises:
        ImportError: TensorRT is not installed or its Python package has no plugins of this kind.
    """
    try:
        import tensorrt as trt
        import tensorrt.plugin as trtp
    except ImportError as error:
        raise ImportError(
            "plugins need TensorRT >= 10.9 for data-centre GPUs: pip install tensorrt"
        ) from error
    if not hasattr(trtp, "aot_impl"):
        raise ImportError(f"plugins need TensorRT >= 10.9, this is {trt.__version__}")
    if not hasattr(trtp.op, NAMESPACE):
        _register_window_attention(trt, trtp)
        _register_layer_norm(trt, trtp)


def _register_window_attention(trt: Any, trtp: Any) -> None:
    @trtp.register(f"{NAMESPACE}::{WINDOW_ATTENTION}")
    def describe(
        qkv: trtp.TensorDesc, bias: trtp.TensorDesc, head_scale: trtp.TensorDesc,
        qkv_bias: trtp.TensorDesc, num_heads: int, window_height: int, window_width: int,
        shift_height: int, shift_width: int, cosine: int, capability: int, multiprocessors: int,
    ) -> tuple[trtp.TensorDesc]:  # fmt: skip
        out = qkv.like()
        out.shape_expr[3] = qkv.shape_expr[3] // 3
        return (out,)

    @trtp.aot_impl(f"{NAMESPACE}::{WINDOW_ATTENTION}")
    def implement(
        qkv: trtp.TensorDesc, bias: trtp.TensorDesc, head_scale: trtp.TensorDesc,
        qkv_bias: trtp.TensorDesc, num_heads: int, window_height: int, window_width: int,
        shift_height: int, shift_width: int, cosine: int, capability: int, multiprocessors: int,
        outputs: tuple[trtp.TensorDesc], tactic: int,
    ) -> tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs]:  # fmt: skip
        tuned, largest = _tuned_and_largest(qkv.shape)
        layer = AttentionLayer(
            dtype=_type_name(trt, qkv), bias_dtype=_type_name(trt, bias), batch=tuned[0],
            map_size=(tuned[1], tuned[2]), largest_map=(largest[1], largest[2]),
            fixed_map=-1 not in list(qkv.shape)[1:3], num_heads=num_heads,
            head_dim=qkv.shape[3] // (3 * num_heads),
            window_size=(window_height, window_width), shift_size=(shift_height, shift_width),
            cosine=bool(cosine), capability=capability, multiprocessors=multiprocessors,
        )  # fmt: skip
        config, ptx = compile_attention(layer)
        check_grid(layer.programs(config, *largest[:3]))
        B, H, W = (qkv.shape_expr[axis] for axis in range(3))
        windows = layer.windows(H, W)
        return _launch(trtp, ptx, layer.programs(config, B, H, W), (H, W, *windows))


def _register_layer_norm(trt: Any, trtp: Any) -> None:
    @trtp.register(f"{NAMESPACE}::{LAYER_NORM}")
    def describe(
        x: trtp.TensorDesc, weight: trtp.TensorDesc, bias: trtp.TensorDesc, eps: trtp.TensorDesc,
        capability: int,
    ) -> tuple[trtp.TensorDesc]:  # fmt: skip
        return (x.like(),)

    @trtp.aot_impl(f"{NAMESPACE}::{LAYER_NORM}")
    def implement(
        x: trtp.TensorDesc, weight: trtp.TensorDesc, bias: trtp.TensorDesc, eps: trtp.TensorDesc,
        capability: int, outputs: tuple[trtp.TensorDesc], tactic: int,
    ) -> tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs]:  # fmt: skip
        layer = LayerNormLayer(
            _type_name(trt, x), _type_name(trt, weight), x.shape[x.ndim - 1], capability
        )
        check_grid(layer.programs(math.prod(_tuned_and_largest(x.shape)[1][:-1])))
        *axes, _ = x.shape_expr
        rows = math.prod(axes[1:], start=axes[0])
        return _launch(trtp, compile_layer_norm(layer), layer.programs(rows), (rows,))


def _launch(trtp: Any, ptx: Any, programs: Any, integers: tuple) -> tuple:
    """What TensorRT wants of an ahead-of-time kernel."""
    launch = trtp.KernelLaunchParams()
    launch.grid_x = programs
    launch.block_x = ptx.threads
    launch.shared_mem = ptx.shared_bytes
    arguments = trtp.SymIntExprs(len(integers))
    for index, integer in enumerate(integers):
        arguments[index] = trtp.SymInt32(integer)
    return ptx.name, ptx.text, launch, arguments


def _tuned_and_largest(shape: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape that an engine is optimised for, and its largest; both the shape where fixed."""
    if shape.is_dynamic:
        return tuple(shape.opt), tuple(shape.max)
    return tuple(shape), tuple(shape)


def _type_name(trt: Any, tensor: Any) -> str:
    """Triton's name of a tensor's type."""
    names = {trt.DataType.FLOAT: "fp32", trt.DataType.HALF: "fp16", trt.DataType.BF16: "bf16"}
    if tensor.dtype not in names:
        raise TypeError(f"plugins take fp32, fp16 and bf16 tensors, got {tensor.dtype}")
    return names[tensor.dtype]
