"""TensorRT's native half in Python, under the real Python front-end of ``tensorrt.plugin``.

The wheel ``tensorrt-cu13-bindings`` holds the front-end as Python files and a native module that
needs TensorRT's libraries. :func:`front_end` takes the files from the wheel and gives them the
classes below instead of the native ones; :func:`plan` does with a registered plugin what the
builder does. Dimension expressions are Python functions of the sizes that are known at run time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

TYPES = ["FLOAT", "HALF", "INT8", "INT32", "BOOL", "UINT8", "FP8", "BF16", "INT64", "INT4"]
DataType = enum.Enum("DataType", TYPES)
TensorFormat = enum.Enum("TensorFormat", ["LINEAR"])
TensorRTPhase = enum.Enum("TensorRTPhase", ["BUILD", "RUNTIME"])
PluginArgType = enum.Enum("PluginArgType", ["INT"])
PluginArgDataType = enum.Enum("PluginArgDataType", ["INT8", "INT16", "INT32"])
QuickPluginCreationRequest = enum.Enum(
    "QuickPluginCreationRequest",
    ["UNKNOWN", "PREFER_JIT", "PREFER_AOT", "STRICT_JIT", "STRICT_AOT"],
)
PluginFieldType = enum.Enum(
    "PluginFieldType",
    ["FLOAT16", "FLOAT32", "FLOAT64", "INT8", "INT16", "INT32", "INT64", "CHAR", "UNKNOWN"],
)
DimensionOperation = enum.Enum(
    "DimensionOperation",
    ["SUM", "PROD", "MAX", "MIN", "SUB", "EQUAL", "LESS", "FLOOR_DIV", "CEIL_DIV"],
)

ARITHMETIC: dict[Any, Callable[[int, int], int]] = {
    DimensionOperation.SUM: lambda a, b: a + b,
    DimensionOperation.SUB: lambda a, b: a - b,
    DimensionOperation.PROD: lambda a, b: a * b,
    DimensionOperation.FLOOR_DIV: lambda a, b: a // b,
    DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
    DimensionOperation.MAX: max,
    DimensionOperation.MIN: min,
}


class IDimensionExpr:
    """A size as a function of the sizes that a call decides, by name."""

    def __init__(self, value: Callable[[Mapping[str, int]], int], constant: bool) -> None:
        self.value, self._constant = value, constant

    def is_constant(self) -> bool:
        return self._constant

    def get_constant_value(self) -> int:
        return self.value({})


class IExprBuilder:
    def constant(self, value: int) -> IDimensionExpr:
        return IDimensionExpr(lambda sizes: value, True)

    def symbol(self, name: str) -> IDimensionExpr:
        return IDimensionExpr(lambda sizes: sizes[name], False)

    def operation(self, op: Any, a: IDimensionExpr, b: IDimensionExpr) -> IDimensionExpr:
        compute = ARITHMETIC[op]
        constant = a.is_constant() and b.is_constant()
        return IDimensionExpr(lambda sizes: compute(a.value(sizes), b.value(sizes)), constant)


class Dims(list):
    MAX_DIMS = 8


class DimsExprs(list):
    def __init__(self, rank: int) -> None:
        super().__init__([None] * rank)


@dataclasses.dataclass
class PluginTensorDesc:
    dims: Dims = dataclasses.field(default_factory=Dims)
    type: Any = None
    format: Any = TensorFormat.LINEAR
    scale: float = 1.0


@dataclasses.dataclass
class DynamicPluginTensorDesc:
    desc: PluginTensorDesc
    min: Dims
    opt: Dims
    max: Dims


class PluginField:
    def __init__(self, name: str, data: Any, type: Any) -> None:
        self.name, self.data, self.type = name, np.asarray(data), type


class PluginFieldCollection(list):
    pass


class IPluginCreatorV3Quick:
    name: str
    plugin_namespace: str
    plugin_version: str
    field_names: PluginFieldCollection


class Registry:
    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], IPluginCreatorV3Quick] = {}

    def register_creator(self, creator: IPluginCreatorV3Quick, namespace: str) -> None:
        self.creators[creator.name, creator.plugin_version, namespace] = creator

    def get_creator(self, name: str, version: str, namespace: str) -> IPluginCreatorV3Quick:
        return self.creators[name, version, namespace]


class Logger:
    WARNING = 2

    def log(self, severity: int, message: str) -> None:
        pass


class ISymExpr:
    type: Any
    dtype: Any
    expr: IDimensionExpr


class _Collected:
    """Receives the launch and its integers from the front-end."""

    def __init__(self) -> None:
        self.integers: dict[int, ISymExpr] = {}
        self.nbSymExprs = 0

    def __setitem__(self, index: int, value: ISymExpr) -> None:
        self.integers[index] = value


def native_module(search_path: list[str]) -> types.ModuleType:
    """``tensorrt`` as the front-end sees it; its submodules come from ``search_path``."""
    module = types.ModuleType("tensorrt")
    module.__path__ = search_path  # type: ignore[attr-defined]
    module.__version__ = "11.4.0.106"  # type: ignore[attr-defined]
    registry = Registry()
    names = {
        DataType, TensorFormat, TensorRTPhase, PluginArgType, PluginArgDataType,
        QuickPluginCreationRequest, PluginFieldType, DimensionOperation, IDimensionExpr, Dims,
        IExprBuilder, DimsExprs, PluginTensorDesc, DynamicPluginTensorDesc, PluginField,
        PluginFieldCollection, IPluginCreatorV3Quick, Logger, ISymExpr,
    }  # fmt: skip
    members: dict[str, Any] = {kind.__name__: kind for kind in names}
    for name in (
        "IPluginV3", "IPluginV3QuickCore", "IPluginV3QuickBuild", "IPluginV3QuickRuntime",
        "IPluginV3QuickAOTBuild", "ITensor",
    ):  # fmt: skip
        members[name] = type(name, (), {})
    members |= {
        "float32": DataType.FLOAT, "float16": DataType.HALF, "bfloat16": DataType.BF16,
        "int32": DataType.INT32, "get_plugin_registry": lambda: registry,
    }  # fmt: skip
    vars(module).update(members)
    return module


@contextlib.contextmanager
def front_end() -> Iterator[types.ModuleType]:
    """``tensorrt`` importable inside the block, plugins and all; no trace of it after."""
    bindings = importlib.util.find_spec("tensorrt_bindings")
    assert bindings is not None, "these tests need the wheel tensorrt-cu13-bindings"
    assert bindings.submodule_search_locations is not None
    saved = {name: m for name, m in sys.modules.items() if name.split(".")[0] == "tensorrt"}
    for name in saved:
        del sys.modules[name]
    module = native_module(list(bindings.submodule_search_locations))
    sys.modules["tensorrt"] = module
    try:
        importlib.import_module("tensorrt.plugin")
        yield module
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "tensorrt"]:
            del sys.modules[name]
        sys.modules.update(saved)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an engine would hold of one plugin layer; every size is a function of the symbols.

    Attributes:
        kernel, ptx: name and text that it embeds.
        output_types, output_shape: of its outputs.
        grid, block, shared_bytes: of a launch.
        integers: 32-bit arguments between the inputs and the outputs.
    """

    kernel: str
    ptx: str
    output_types: list[Any]
    output_shape: Callable[[Mapping[str, int]], list[int]]
    grid: Callable[[Mapping[str, int]], tuple[int, int, int]]
    block: tuple[int, int, int]
    shared_bytes: int
    integers: Callable[[Mapping[str, int]], list[int]]


def plan(
    trt: Any,
    name: str,
    attributes: Mapping[str, int],
    inputs: list[tuple[str, list[int | str]]],
    opt: Mapping[str, int],
    largest: Mapping[str, int],
) -> Plan:
    """Do with a plugin of ours what the builder does, up to the engine.

    Args:
        trt: from :func:`front_end`, plugins registered.
        name: of the plugin.
        attributes: as the ONNX node has them.
        inputs: (TensorRT type, shape) of each; a name in a shape is a symbol.
        opt, largest: symbols' values that the profile is optimised for, and their largest.
    """
    creator = trt.get_plugin_registry().get_creator(name, "1", "fastswin")
    fields = PluginFieldCollection(
        PluginField(f.name, np.array([attributes[f.name]], np.int64), f.type)
        for f in creator.field_names
    )
    plugin = creator.create_plugin(
        name, "fastswin", fields, TensorRTPhase.BUILD, QuickPluginCreationRequest.STRICT_AOT
    )
    input_types = [getattr(DataType, kind) for kind, _ in inputs]
    output_types = plugin.get_output_data_types(input_types, [len(s) for _, s in inputs])
    builder = IExprBuilder()
    shapes = [
        [builder.symbol(d) if isinstance(d, str) else builder.constant(d) for d in shape]
        for _, shape in inputs
    ]
    (output,) = plugin.get_output_shapes(shapes, [], builder)
    in_out = [_described(t, s, opt, largest) for t, (_, s) in zip(input_types, inputs, strict=True)]
    static = [_evaluated(output, values) for values in (opt, largest)]
    dims = [d if e.is_constant() else -1 for d, e in zip(static[0], output, strict=True)]
    in_out.append(
        DynamicPluginTensorDesc(
            PluginTensorDesc(Dims(dims), output_types[0]), Dims(static[0]), Dims(static[0]),
            Dims(static[1]),
        )
    )  # fmt: skip
    plugin.configure_plugin(in_out[:-1], in_out[-1:])
    plugin.set_tactic(0)
    launch, setter = types.SimpleNamespace(), _Collected()
    plugin.get_launch_params(shapes, in_out, len(inputs), launch, setter, builder)
    static_descs = [d.desc for d in in_out]
    kernel, ptx = plugin.get_kernel(static_descs[:-1], static_descs[-1:])
    assert setter.nbSymExprs == len(setter.integers)
    integers = [setter.integers[i] for i in range(setter.nbSymExprs)]
    assert all(i.dtype is PluginArgDataType.INT32 for i in integers)

    def triple(prefix: str, sizes: Mapping[str, int]) -> tuple[int, int, int]:
        x, y, z = (getattr(launch, f"{prefix}_{axis}").expr.value(sizes) for axis in "xyz")
        return x, y, z

    return Plan(
        kernel=kernel,
        ptx=ptx.decode(),
        output_types=output_types,
        output_shape=lambda sizes: _evaluated(output, sizes),
        grid=lambda sizes: triple("grid", sizes),
        block=triple("block", {}),
        shared_bytes=launch.shared_mem.expr.value({}),
        integers=lambda sizes: [i.expr.value(sizes) for i in integers],
    )


def _described(
    kind: Any, shape: list[int | str], opt: Mapping[str, int], largest: Mapping[str, int]
) -> DynamicPluginTensorDesc:
    def dims(values: Mapping[str, int] | None) -> Dims:
        return Dims((values[d] if values else -1) if isinstance(d, str) else d for d in shape)

    smallest = dict.fromkeys(opt, 1)
    return DynamicPluginTensorDesc(
        PluginTensorDesc(dims(None), kind), dims(smallest), dims(opt), dims(largest)
    )


def _evaluated(exprs: list[IDimensionExpr], sizes: Mapping[str, int]) -> list[int]:
    return [e.value(sizes) for e in exprs]
