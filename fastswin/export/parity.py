"""Does an exported graph give the readable model's answers? ONNX Runtime on the CPU says.

Every batch size and kind of image runs twice, with the runtime's graph optimisation (and so its
constant folding) on and off: a mask or a chain of index operators that folds to NaN shows here,
not in production.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastswin.export.attention_op import DOMAIN, expand_window_attention
from fastswin.export.report import Parity, ParityError, ParityRow
from fastswin.models import SwinTransformer

Pair = tuple[int, int]

#: Largest legal difference from the fp32 model; :func:`legal_difference` says of what.
#: fp32: the project's gate. fp16: about 20 roundings of the residual stream (2**-11 each). 8-bit:
#: finds a wrong scale or layer; whether an accuracy is good enough, only a test set can say.
BOUNDS = {"fp32": 1e-4, "fp16": 1e-2, "8-bit": 0.25}

#: Batches a graph with a dynamic batch axis is checked at.
BATCHES = (1, 2, 3, 8)


def check_parity(
    path: str | Path,
    model: SwinTransformer,
    *,
    precision: str = "fp32",
    batches: Sequence[int] = BATCHES,
    image_sizes: Sequence[Pair] = (),
    images: torch.Tensor | None = None,
    features: bool = False,
    bound: float | None = None,
) -> Parity:
    """Compare an ONNX file with its model through ONNX Runtime, folded and unfolded.

    Args:
        path: the ``.onnx`` file.
        model: the fp32 readable model.
        precision: key of :data:`BOUNDS`.
        batches: batch sizes to run.
        image_sizes: ``(height, width)`` of random images; empty takes the model's own.
        images: real normalised images ``[B, C, h, w]`` to run as well.
        features: the graph returns the stages' maps.
        bound: largest legal absolute difference; None takes :func:`legal_difference`.

    Returns:
        Every comparison.

    Raises:
        ParityError: an output is NaN or infinite, or a difference exceeds the bound.
        ImportError: ONNX Runtime is missing.
    """
    largest = max(batches)
    generator = torch.Generator().manual_seed(2026)
    inputs = []
    for size in image_sizes or [model.config.image_size]:
        shape = (largest, model.config.in_channels, *size)
        inputs.append(("random", torch.randn(shape, generator=generator)))
    if images is not None:
        inputs.append(("real", images[:largest].float()))
    expected = [reference_outputs(model, x, features) for _, x in inputs]
    largest_output = max(float(abs(y).max()) for ys in expected for y in ys)
    if bound is None:
        bound = legal_difference(precision, largest_output, features=features)
    rows = []
    for folded in (True, False):
        session = open_session(path, folded=folded)
        for (kind, x), reference in zip(inputs, expected, strict=True):
            for batch in sorted({min(batch, len(x)) for batch in batches}):
                outputs = session.run(None, {"images": x[:batch].numpy()})
                rows.append(
                    _compare(kind, folded, x[:batch], outputs, [y[:batch] for y in reference])
                )
                _judge(rows[-1], bound, features)
    return Parity(float(bound), largest_output, tuple(rows))


def legal_difference(precision: str, largest_output: float, *, features: bool = False) -> float:
    """Largest legal absolute difference from the fp32 model's outputs.

    fp32 logits: :data:`BOUNDS` whatever their size. Elsewhere it is meant for outputs up to 1 and
    grows with the largest beyond: half precision and 8 bits err in proportion, and stage maps hold
    the residual stream, which nothing bounds (hundreds in a trained V2).

    Args:
        precision: key of :data:`BOUNDS`.
        largest_output: largest element of the fp32 model's outputs, without its sign.
        features: whether they are stage maps.
    """
    if precision == "fp32" and not features:
        return BOUNDS[precision]
    return BOUNDS[precision] * max(1.0, largest_output)


def open_session(path: str | Path, *, folded: bool = True) -> Any:
    """An ONNX Runtime session on the CPU with as many threads as torch has.

    Args:
        path: the ``.onnx`` file.
        folded: whether to run the runtime's graph optimisation.

    Raises:
        ImportError: ONNX Runtime is missing; the message names the extra.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(
            "the parity check runs the graph in ONNX Runtime: pip install 'fastswin[export]', "
            "or export with check=False"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # its advice about casts of fp16 graphs on CPUs
    # without it, 8-bit products saturate their 16-bit sums on CPUs that have AVX2 but not VNNI
    options.add_session_config_entry("session.x64quantprecision", "1")
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if folded else levels.ORT_DISABLE_ALL
    with _runnable(Path(path)) as runnable:
        return onnxruntime.InferenceSession(
            str(runnable), options, providers=["CPUExecutionProvider"]
        )


@contextlib.contextmanager
def _runnable(path: Path) -> Iterator[Path]:
    """What ONNX Runtime loads: the file, or a copy with our own operator written out."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    if not any(node.domain == DOMAIN for node in model.graph.node):
        yield path
        return
    expanded = path.with_name(f".expanded-{path.name}")  # external weights are found beside it
    try:
        onnx.save(expand_window_attention(model), str(expanded))
        yield expanded
    finally:
        expanded.unlink(missing_ok=True)


def reference_outputs(
    model: SwinTransformer, images: torch.Tensor, features: bool
) -> list[np.ndarray]:
    """The readable model's logits, or its stage maps, in fp32."""
    parameter = next(model.parameters())
    training = model.training
    model.eval()
    with torch.no_grad():
        x = images.to(parameter.device, parameter.dtype)
        outputs = model.forward_features(x) if features else [model(x)]
    model.train(training)
    return [y.float().cpu().numpy() for y in outputs]


def _compare(
    kind: str,
    folded: bool,
    images: torch.Tensor,
    outputs: list[np.ndarray],
    expected: list[np.ndarray],
) -> ParityRow:
    difference = 0.0
    for actual, wanted in zip(outputs, expected, strict=True):
        if actual.shape != wanted.shape:
            raise ParityError(
                f"the graph returned shape {actual.shape} instead of {wanted.shape} at batch "
                f"{len(images)}"
            )
        finite = np.isfinite(actual).all()
        difference = max(difference, float(abs(actual - wanted).max()) if finite else np.inf)
    agreement = None
    if expected[0].ndim == 2:
        agreement = float((outputs[0].argmax(1) == expected[0].argmax(1)).mean())
    size = (images.shape[2], images.shape[3])
    return ParityRow(kind, folded, len(images), size, difference, agreement)


def _judge(row: ParityRow, bound: float, features: bool) -> None:
    where = (
        f"{row.images} images, batch {row.batch}, {row.image_size[0]}x{row.image_size[1]}, "
        f"{'folded' if row.folded else 'unfolded'}"
    )
    if not np.isfinite(row.max_abs_diff):
        raise ParityError(f"the exported graph gives NaN or infinity ({where}); no file was kept")
    if row.max_abs_diff > bound:
        what = "features" if features else "logits"
        raise ParityError(
            f"the exported graph's {what} differ from the model's by {row.max_abs_diff:.2e}, "
            f"more than {bound:.1e} ({where}); no file was kept"
        )
