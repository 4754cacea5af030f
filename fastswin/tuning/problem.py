"""One kernel launch as the tuner sees it: an operator, what fixes its code, and how many rows.

    linear             rows M   N, K, gelu, residual
    layer_norm_linear  rows M   N, K, gelu
    mlp                rows M   C, hidden, post_norm
    window_attention   windows  window_h, window_w, heads, head_dim, cosine
    layer_norm         rows M   C, residual (with its affine)
    library_linear     rows M   N, K                the library's GEMM with its bias
    library_accumulate rows M   N, K                the library's GEMM onto the residual, in place
    gelu               rows M   C

Rows scale with batch and image size; the rest belongs to the model. The last four have nothing to
choose: they are timed because layers are built from them (layers.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fastswin.ops.hopper_gemm.config import HopperGemmConfig
from fastswin.ops.hopper_resident.config import ResidentMlpConfig, ResidentProductConfig
from fastswin.ops.linear.config import GemmConfig, LayerNormLinearConfig, OneShotConfig
from fastswin.ops.mlp.config import MlpConfig
from fastswin.ops.streamed_mlp.config import StreamedMlpConfig
from fastswin.ops.window_attention.config import WindowAttentionConfig

LaunchConfig = (
    GemmConfig
    | HopperGemmConfig
    | LayerNormLinearConfig
    | OneShotConfig
    | ResidentProductConfig
    | MlpConfig
    | ResidentMlpConfig
    | StreamedMlpConfig
    | WindowAttentionConfig
)

#: Configuration of each operator that has one; the order of its fields is that of the dataclass.
CONFIG_TYPES: dict[str, type] = {
    "linear": GemmConfig,
    "layer_norm_linear": LayerNormLinearConfig,
    "mlp": MlpConfig,
    "window_attention": WindowAttentionConfig,
}

#: Configurations of other kernels that serve the same problem; told apart by their fields.
ALTERNATIVES: dict[str, tuple[type, ...]] = {
    "linear": (OneShotConfig, HopperGemmConfig),
    "layer_norm_linear": (OneShotConfig, ResidentProductConfig),
    "mlp": (ResidentMlpConfig, StreamedMlpConfig),
}

#: Names of the numbers that fix an operator's code.
SHAPE_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": ("N", "K", "gelu", "residual"),
    "layer_norm_linear": ("N", "K", "gelu"),
    "mlp": ("C", "hidden", "post_norm"),
    "window_attention": ("window_h", "window_w", "heads", "head_dim", "cosine"),
    "layer_norm": ("C", "residual"),
    "library_linear": ("N", "K"),
    "library_accumulate": ("N", "K"),
    "gelu": ("C",),
}

ITEMSIZE = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}


@dataclasses.dataclass(frozen=True)
class KernelProblem:
    """What one launch has to do.

    Attributes:
        op: key of :data:`SHAPE_FIELDS`.
        dtype: "fp32", "tf32", "fp16" or "bf16".
        rows: tokens of the batch; windows of the batch for attention.
        shape: one number for each of the operator's fields, in their order.
    """

    op: str
    dtype: str
    rows: int
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def dims(self) -> dict[str, int]:
        """The shape by name."""
        return dict(zip(SHAPE_FIELDS[self.op], self.shape, strict=True))

    @property
    def kernel(self) -> tuple[str, str, tuple[int, ...]]:
        """What problems of any number of rows share."""
        return self.op, self.dtype, self.shape

    def __str__(self) -> str:
        dims = " ".join(f"{name}={value}" for name, value in self.dims.items())
        return f"{self.op} {self.dtype} rows={self.rows} {dims}"


def make_problem(op: str, dtype: str, rows: int, **dims: int) -> KernelProblem:
    """A problem from its shape by name; flags count as 0 and 1.

    Raises:
        ValueError: an unknown operator or dtype, or other names than the operator has.
    """
    if op not in SHAPE_FIELDS:
        raise ValueError(f"op must be one of {', '.join(SHAPE_FIELDS)}, got {op!r}")
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype must be one of {', '.join(ITEMSIZE)}, got {dtype!r}")
    fields = SHAPE_FIELDS[op]
    if set(dims) != set(fields):
        raise ValueError(f"the shape of {op} is {', '.join(fields)}; got {', '.join(dims)}")
    return KernelProblem(op, dtype, rows, tuple(int(dims[name]) for name in fields))


def config_to_dict(config: LaunchConfig) -> dict[str, Any]:
    """Plain values for JSON."""
    values = dataclasses.asdict(config)
    return {k: list(value) if isinstance(value, tuple) else value for k, value in values.items()}


def config_from_dict(op: str, values: dict[str, Any]) -> LaunchConfig:
    """The configuration of a stored row.

    Raises:
        ValueError: a field that this version does not know, one that it misses, or a value that is
            no integer; the message names it.
    """
    kind = CONFIG_TYPES[op]
    for other in ALTERNATIVES.get(op, ()):
        if set(values) == {field.name for field in dataclasses.fields(other)}:
            kind = other
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(set(values) - set(fields)):
        raise ValueError(f"{op}: unknown config field {unknown[0]!r}")
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise ValueError(f"{op}: config field {name!r} is missing")
    converted: dict[str, Any] = {}
    for name, value in values.items():
        if name == "key_tiles":
            if not isinstance(value, (list, tuple)) or len(value) > 2:
                raise ValueError(f"{op}: key_tiles must hold at most two integers, got {value!r}")
            value = tuple(value)
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(number, int) for number in numbers):
            raise ValueError(f"{op}: config field {name!r} must be an integer, got {value!r}")
        converted[name] = value
    return kind(**converted)
