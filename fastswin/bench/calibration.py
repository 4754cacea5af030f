"""Ranges of benchmark models: a checkpoint's own, or from seeded noise like their weights."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

from fastswin.bench.problems import Problem
from fastswin.bench.source import Source
from fastswin.data.source import RANGES_NAME
from fastswin.models import SwinTransformer, from_live
from fastswin.quant import (
    Calibration,
    QuantizationError,
    QuantizedSwin,
    calibration_of,
    load_ranges,
    observe,
)
from fastswin.quant.observations import Observations

#: Images that ranges are taken from, and their seed, which is no seed of a timed or checked image.
CALIBRATION_IMAGES, CALIBRATION_SEED = 8, 77

#: Calibrating is slow, and every quantised contender of a model needs the same observations.
_LAST: list[tuple[nn.Module, SwinTransformer, Observations | None, dict[str, Calibration]]] = []


def calibration_for(source: Source, problem: Problem, device: torch.device) -> Calibration:
    """Ranges for a quantised problem: the checkpoint's own, else from seeded images.

    What the last source was found to need is kept, for all schemes.

    Args:
        source: the model.
        problem: its dtype names the scheme.
        device: where the images are run.
    """
    return _calibrated(source, problem, device)[1]


def integer_reference(source: Source, problem: Problem, device: torch.device) -> QuantizedSwin:
    """The model on true 8-bit operands, in PyTorch on the device."""
    model, calibration = _calibrated(source, problem, device)
    return QuantizedSwin(_on(model, device), calibration)


def _calibrated(
    source: Source, problem: Problem, device: torch.device
) -> tuple[SwinTransformer, Calibration]:
    if not _LAST or _LAST[0][0] is not source.engine_source:
        readable = source.engine_source
        model = readable if isinstance(readable, SwinTransformer) else from_live(readable)
        _LAST[:] = [(readable, model, None, _stored(problem, model))]
    _, model, seen, found = _LAST[0]
    if problem.dtype not in found:
        if seen is None:
            config = problem.swin_config
            generator = torch.Generator().manual_seed(CALIBRATION_SEED)
            shape = (CALIBRATION_IMAGES, config.in_channels, *config.image_size)
            images = torch.randn(shape, generator=generator)
            seen = observe(_on(model, device), images.to(device))
            _LAST[:] = [(source.engine_source, model, seen, found)]
        found[problem.dtype] = calibration_of(model, seen, problem.dtype)
    return model, found[problem.dtype]


def _stored(problem: Problem, model: SwinTransformer) -> dict[str, Calibration]:
    """Ranges that came with a checkpoint, inside or beside it, by the name of their scheme."""
    if problem.checkpoint is None:
        return {}
    path = Path(problem.checkpoint)
    for place in (path, path.with_name(RANGES_NAME)):
        if place.suffix in (".safetensors", ".json") and place.is_file():
            try:
                return load_ranges(place, model)
            except QuantizationError:  # none inside, or of other weights
                continue
    return {}


def _on(model: SwinTransformer, device: torch.device) -> SwinTransformer:
    """The model itself on a CPU, else a copy."""
    return model if device.type == "cpu" else copy.deepcopy(model).to(device)
