"""int8 ranges for benchmark models, whose weights and images are seeded noise."""

from __future__ import annotations

import torch
from torch import nn

from fastswin.bench.source import Source
from fastswin.models import SwinTransformer, from_live
from fastswin.models.config import SwinConfig
from fastswin.quant import Calibration, QuantizedSwin, calibrate

#: Images that ranges are taken from, and their seed, which is no seed of a timed or checked image.
CALIBRATION_IMAGES, CALIBRATION_SEED = 8, 77

#: Calibrating is slow, and every int8 contender of a problem needs the same ranges.
_LAST: list[tuple[nn.Module, SwinTransformer, Calibration]] = []


def seeded_calibration(source: Source, config: SwinConfig) -> Calibration:
    """Ranges of a source's weights under the scheme "int8"; the last ones are kept."""
    return _calibrated(source, config)[1]


def integer_reference(source: Source, config: SwinConfig) -> QuantizedSwin:
    """The model on true 8-bit operands, in PyTorch on the CPU."""
    model, calibration = _calibrated(source, config)
    return QuantizedSwin(model, calibration)


def _calibrated(source: Source, config: SwinConfig) -> tuple[SwinTransformer, Calibration]:
    for module, model, calibration in _LAST:
        if module is source.engine_source:
            return model, calibration
    readable = source.engine_source
    model = readable if isinstance(readable, SwinTransformer) else from_live(readable)
    generator = torch.Generator().manual_seed(CALIBRATION_SEED)
    shape = (CALIBRATION_IMAGES, config.in_channels, *config.image_size)
    calibration = calibrate(model, torch.randn(shape, generator=generator), "int8")
    _LAST[:] = [(source.engine_source, model, calibration)]
    return model, calibration
