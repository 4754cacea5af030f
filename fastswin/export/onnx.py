"""Export to ONNX: the readable model as a small graph of standard operators, checked before use.

    images [batch, C, h, w] fp32  ->  logits [batch, classes] fp32, or one map a stage

The batch axis is dynamic unless a number is given; the image size is fixed, so that another one is
refused by the graph itself, unless ``dynamic_size`` asks for a graph that is right at each size.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from fastswin.export import dynamic_functions as functions
from fastswin.export.graph_attention import AttentionForm
from fastswin.export.graph_dynamic import DynamicSwin
from fastswin.export.graph_map import MapSwin
from fastswin.export.graph_model import GraphSwin
from fastswin.export.half import to_half
from fastswin.export.opset import MIN_OPSET, Opset, resolve_opset
from fastswin.export.parity import BATCHES, check_parity
from fastswin.export.qdq import insert_qdq, layers_of
from fastswin.export.report import ExportReport, Parity, ParityError
from fastswin.export.source import Source, open_model
from fastswin.models import SwinConfig, SwinTransformer
from fastswin.models.geometry import to_pair

__all__ = ["ExportReport", "Parity", "ParityError", "export_onnx"]

Pair = tuple[int, int]
GraphPrecision = Literal["fp32", "fp16"]

#: Weights beyond this go to a file beside the graph, which runtimes map instead of parsing.
EXTERNAL_DATA_BYTES = 256 * 1024 * 1024

#: Constants above this size stay as they are when a graph is folded: only shapes and scalars are
#: small enough, and the sum of a bias with the shared shift mask is not written once per block.
FOLD_INPUT_BYTES = 1024


def export_onnx(
    source: Source,
    path: str | os.PathLike,
    *,
    precision: GraphPrecision = "fp32",
    batch: int | Literal["dynamic"] = "dynamic",
    image_size: int | Pair | None = None,
    dynamic_size: bool = False,
    opset: Opset = MIN_OPSET,
    attention: AttentionForm = "plain",
    features: bool = False,
    fold: bool = True,
    check: bool = True,
    pretrained: bool = True,
    images: torch.Tensor | None = None,
    bound: float | None = None,
    check_batches: Sequence[int] = BATCHES,
    calibration: Any = None,
) -> ExportReport:
    """Write a Swin model as ONNX and compare it with the model; a wrong graph leaves no file.

    Args:
        source: a shipped or published name, a checkpoint's path, or a live model.
        path: the ``.onnx`` file to write, whole or not at all; big weights go to ``<path>.data``.
        precision: ``"fp16"`` types the whole graph: fp16 weights and products, fp32 where
            half.py says; images and outputs stay fp32.
        batch: ``"dynamic"``, or the one batch size that the graph will take.
        image_size: ``(height, width)`` in pixels, or one number for both; None is the model's.
        dynamic_size: make height and width dynamic as well.
        opset: ONNX operator set, at least 20, or ``"newest"`` that the installed exporter writes;
            ``attention="standard"`` needs 23.
        attention: ``"plain"`` runs anywhere; ``"standard"`` writes ONNX's ``Attention``;
            ``"fastswin"`` writes one ``fastswin::WindowAttention`` node a block, for a plugin.
        features: return every stage's map ``[batch, H_i, W_i, C_i]`` instead of the logits.
        fold: fold shape constants and drop operators without effect.
        check: compare with the model in ONNX Runtime (parity.py); needs onnxruntime.
        pretrained: whether a published name gets its weights or random ones.
        images: real normalised images ``[B, C, h, w]`` for the check; None takes the shipped test
            images for a shipped model, else random images alone.
        bound: largest legal absolute difference; None takes
            :func:`fastswin.export.parity.legal_difference`: 1e-4 for fp32 logits.
        check_batches: batch sizes that a graph with a dynamic batch axis is checked at.
        calibration: a :class:`fastswin.quant.ranges.Calibration` of this model; its layers become
            Q/DQ in int8 or fp8 (qdq.py), and ``precision`` types the rest.

    Returns:
        What was written, and every comparison.

    Raises:
        ValueError: an argument is out of its legal range; the message names it.
        ParityError: NaN, or a difference beyond the bound.
        ImportError: a package of the extra ``export`` is missing.
    """
    path = Path(path)
    _check_arguments(path, precision, batch, attention, dynamic_size)
    if calibration is not None and (dynamic_size or attention == "fastswin"):
        raise ValueError("calibration needs a fixed image size and attention='plain' or 'standard'")
    require_exporter()
    opset = resolve_opset(opset, attention)
    model, description, shipped = open_model(source, pretrained=pretrained)
    size = model.config.image_size if image_size is None else to_pair(image_size, "image_size")
    started = time.perf_counter()
    graph = build_graph(
        model, size, attention, features=features, dynamic_size=dynamic_size,
        fold_norms=calibration is not None,
    )  # fmt: skip
    if precision == "fp16":
        to_half(graph)
    program = trace(graph, model, size, batch=batch, opset=opset)
    _simplify(program.model, fold=fold)
    checked_as: str = precision
    if calibration is not None:
        calibration.check(model)
        checked_as = "8-bit"
        insert_qdq(program.model, layers_of(calibration, graph.query_scale()))
    _describe(program.model, model, size, precision, attention)
    op_counts = Counter(node.op_type for node in program.model.graph)
    with _written(path, program) as (temporary, written):
        seconds = time.perf_counter() - started
        parity = None
        if check:
            parity = check_parity(
                temporary, model, precision=checked_as, features=features, bound=bound,
                batches=check_batches if batch == "dynamic" else (batch,),
                image_sizes=[size, *(other_sizes(model.config, size) if dynamic_size else ())],
                images=shipped if images is None and size == model.config.image_size else images,
            )  # fmt: skip
    return ExportReport(
        path=path, external_data=written, source=description, precision=precision,
        attention=attention, opset=opset, batch=batch, image_size=size, dynamic_size=dynamic_size,
        features=features, folded=fold, op_counts=op_counts,
        file_bytes=path.stat().st_size + (written.stat().st_size if written else 0),
        export_seconds=seconds, parity=parity,
    )  # fmt: skip


def other_sizes(config: SwinConfig, image_size: Pair) -> list[Pair]:
    """Sizes that a graph for any size is checked at besides its own: larger, odd, not square."""
    height, width = image_size
    step = config.patch_size * 2 ** (config.num_stages - 1)
    return [(height + step + 1, width), (height + config.patch_size, 2 * width - 1)]


def build_graph(
    model: SwinTransformer,
    image_size: Pair,
    attention: AttentionForm = "plain",
    *,
    features: bool = False,
    dynamic_size: bool = False,
    fold_norms: bool = False,
) -> Any:
    """The traceable form of a model for one way of writing it; weights are copied."""
    with torch.no_grad():
        if dynamic_size:
            return DynamicSwin(model.float(), features=features).eval()
        if attention == "fastswin":
            return MapSwin(model.float(), image_size, features=features).eval()
        return GraphSwin(
            model.float(), image_size, attention, features=features, fold_norms=fold_norms
        ).eval()


def trace(
    graph: nn.Module,
    model: SwinTransformer,
    image_size: Pair,
    *,
    batch: int | Literal["dynamic"],
    opset: int,
) -> Any:
    """Run PyTorch's exporter; the program is not optimised yet."""
    Dim = torch.export.Dim
    axes: dict[int, Any] = {0: Dim("batch", min=1)} if batch == "dynamic" else {}
    examples = 2 if batch == "dynamic" else batch
    images = torch.zeros(examples, model.config.in_channels, *image_size)
    names = ["logits"]
    if getattr(graph, "features", False):
        names = [f"stage{i}" for i in range(model.config.num_stages)]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's advice about its own deprecations
        program = torch.onnx.export(
            graph, (images,), dynamo=True, opset_version=opset, optimize=False, verbose=False,
            input_names=["images"], output_names=names,
            dynamic_shapes={"images": axes} if axes else None,
        )  # fmt: skip
    assert program is not None
    if isinstance(graph, DynamicSwin):
        _free_size(program.model, graph, opset)
    return program


def _free_size(model: Any, graph: DynamicSwin, opset: int) -> None:
    """Give the placeholders their bodies, and the input and the maps their dynamic axes."""
    import onnx_ir
    from onnx_ir.passes.common import InlinePass

    for proto in graph.table.protos(opset):
        function = onnx_ir.serde.deserialize_function(proto)
        model.functions[function.identifier()] = function
    InlinePass()(model)
    model.opset_imports.pop(functions.DOMAIN, None)
    for node in model.graph:  # shapes of the traced size
        for value in node.outputs:
            value.shape = None
    for value in model.graph.inputs:
        value.shape = onnx_ir.Shape([*value.shape[:2], "height", "width"])


def require_exporter() -> None:
    """Raise ImportError, naming the extra, unless the packages PyTorch's exporter needs exist."""
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"exporting to ONNX needs {' and '.join(missing)}: pip install 'fastswin[export]'"
        )


def _check_arguments(
    path: Path, precision: str, batch: Any, attention: str, dynamic_size: bool
) -> None:
    if path.suffix != ".onnx":
        raise ValueError(f"path must end in .onnx, got {path.name!r}")
    if precision not in get_args(GraphPrecision):
        raise ValueError(f"precision must be one of {get_args(GraphPrecision)}, got {precision!r}")
    if batch != "dynamic" and (not isinstance(batch, int) or batch < 1):
        raise ValueError(f"batch must be 'dynamic' or a positive integer, got {batch!r}")
    if attention not in get_args(AttentionForm):
        raise ValueError(f"attention must be one of {get_args(AttentionForm)}, got {attention!r}")
    if dynamic_size and attention != "plain":
        raise ValueError("dynamic_size needs attention='plain'")


def _simplify(model: Any, *, fold: bool) -> None:
    """Fold small constants, and write each distinct constant once."""
    import onnx_ir
    from onnx_ir.passes.common import DeduplicateInitializersPass, RemoveUnusedNodesPass
    from onnxscript import optimizer

    def foldable(node: Any) -> bool | None:
        if node.op_type in ("SplitToSequence", "SequenceAt"):
            return None  # few runtimes know sequences, an accident of the exporter
        if node.op_type == "Reshape" and all(_is_small(value) for value in node.inputs):
            return None  # axes of a reduction, which TensorRT's parser does not compute
        if not fold:
            return False
        # a constant index of any size that the exporter casts to what it is already
        index = node.op_type == "Cast" and node.inputs[0].dtype == onnx_ir.DataType.INT64
        return True if index and node.inputs[0].is_initializer() else None

    optimizer.optimize_ir(
        model,
        onnx_shape_inference=False,
        input_size_limit=FOLD_INPUT_BYTES,
        should_fold=foldable,
    )
    DeduplicateInitializersPass(size_limit=2**31)(model)
    RemoveUnusedNodesPass()(model)


def _is_small(value: Any) -> bool:
    """Whether an operand is a constant of at most eight elements, such as axes or a shape."""
    constant = None if value is None else value.const_value
    return constant is not None and constant.size <= 8


def _describe(
    program: Any, model: SwinTransformer, size: Pair, precision: str, attention: str
) -> None:
    """What a reader of the file needs to know, as the file's metadata."""
    from fastswin import __version__

    program.producer_name, program.producer_version = "fastswin", __version__
    program.metadata_props.update(
        {
            "fastswin.config": json.dumps(model.config.to_dict()),
            "fastswin.image_size": json.dumps(size),
            "fastswin.precision": precision,
            "fastswin.attention": attention,
        }
    )


@contextlib.contextmanager
def _written(path: Path, program: Any) -> Iterator[tuple[Path, Path | None]]:
    """Write the files beside their place and move them there when the block succeeds.

    Two files cannot be replaced by one rename: the weights go first, so a reader never finds a
    graph without them.
    """
    import onnx_ir

    path.parent.mkdir(parents=True, exist_ok=True)
    data_path = path.with_name(path.name + ".data")
    tensors = program.model.graph.initializers.values()
    external = sum(t.const_value.nbytes for t in tensors) > EXTERNAL_DATA_BYTES
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        onnx_ir.save(program.model, temporary, external_data=data_path.name if external else None)
        yield temporary, data_path if external else None
        if external:
            os.replace(temporary.with_name(data_path.name), data_path)
        os.replace(temporary, path)
        if not external:
            data_path.unlink(missing_ok=True)  # weights of the graph that was replaced
