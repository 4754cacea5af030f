"""Which ONNX operator sets a graph can be written in."""

from __future__ import annotations

from typing import Literal

Opset = int | Literal["newest"]

#: From this opset on ONNX has Gelu as one operator.
MIN_OPSET = 20

#: Smallest opset with the standard ``Attention`` operator.
ATTENTION_OPSET = 23


def newest_opset() -> int:
    """The newest opset that the installed exporter and onnx both know.

    PyTorch's exporter writes opset 18 and has onnxscript lift the graph to the one asked for;
    beyond the newest that onnxscript knows, the lift leaves a graph that no runtime loads.

    Raises:
        ImportError: onnx or onnxscript is missing.
    """
    from onnx.defs import onnx_opset_version
    from onnxscript.version_converter import _version_converter

    # the name is private; releases without it know 23
    lifted = getattr(_version_converter, "SUPPORTED_MAX_ONNX_OPSET", ATTENTION_OPSET)
    return min(lifted, onnx_opset_version())


def resolve_opset(opset: Opset, attention: str) -> int:
    """The number of an opset that can be written.

    Args:
        opset: a number, or "newest".
        attention: form of the attention; "standard" needs :data:`ATTENTION_OPSET`.

    Raises:
        ValueError: too old or too new; the message names the limit.
        ImportError: onnx or onnxscript is missing.
    """
    newest = newest_opset()
    if opset == "newest":
        opset = newest
    if not isinstance(opset, int) or isinstance(opset, bool):
        raise ValueError(f"opset must be a number or 'newest', got {opset!r}")
    if opset < MIN_OPSET:
        raise ValueError(f"opset must be at least {MIN_OPSET}, got {opset}")
    if opset > newest:
        raise ValueError(
            f"opset must be at most {newest}, the newest that the installed onnxscript writes, "
            f"got {opset}"
        )
    if attention == "standard" and opset < ATTENTION_OPSET:
        raise ValueError(
            f"attention='standard' needs opset {ATTENTION_OPSET} or later, got {opset}"
        )
    return opset
