"""From a model to a runner on the chosen runtime, or to None where PyTorch is to run it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import torch

from fastswin.engine.backends.choose import BackendSelector
from fastswin.engine.backends.ranges import graph_ranges
from fastswin.engine.backends.runner import GraphRunner
from fastswin.engine.calibration import find_calibration
from fastswin.engine.forward import Forward
from fastswin.models import SwinTransformer
from fastswin.quant import Calibration, QuantizedSwin

Exact = Callable[[str, torch.Tensor], list[torch.Tensor]]


def open_runner(
    selector: BackendSelector,
    source: str | os.PathLike[str] | torch.nn.Module,
    model: SwinTransformer,
    forward: Forward,
    exact: Exact,
    calibration: Calibration | None = None,
) -> GraphRunner | None:
    """A runner with a model's present weights.

    Args:
        selector: chooses the runtime.
        source: what the engine was built from; a calibrated checkpoint brings its int8 ranges.
        model: the readable model.
        forward: the PyTorch path with the same weights in fp32.
        exact: "logits" or "features" of images by that path.
        calibration: int8 ranges; None takes the checkpoint's.

    Raises:
        QuantizationError: int8 without ranges of these weights.
        ValueError: no runtime serves the precision.
    """
    precision = selector.precision
    found = None
    if precision.quantized:
        found = find_calibration(source, model, calibration, precision.name)
    ranges = None if found is None else graph_ranges(found)

    def make_runner(runtime: object) -> GraphRunner:
        return GraphRunner(
            runtime,
            forward.config,
            forward.weights,
            position=forward.position_embedding,
            exact=exact,
            dtype=precision.dtype,
            ranges=ranges,
        )

    def expected(images: torch.Tensor) -> torch.Tensor:
        if found is None:
            return exact("logits", images)[0]
        return QuantizedSwin(copy.deepcopy(model).to("cpu", torch.float32), found)(images)

    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return selector.open(make_runner, expected, finite)
