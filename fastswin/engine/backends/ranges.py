"""Where the int8 ranges of an engine come from: an argument, or the checkpoint itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from fastswin.models import SwinTransformer
from fastswin.quant import Calibration, LayerRange, QuantizationError, load_ranges


def find_ranges(
    source: str | os.PathLike[str] | torch.nn.Module,
    model: SwinTransformer,
    calibration: Calibration | None,
) -> Calibration:
    """The int8 calibration of a model.

    Args:
        source: what the engine was built from; a calibrated checkpoint brings its own.
        model: the readable model with the present weights.
        calibration: given by the user, or None.

    Raises:
        QuantizationError: there is none, it is of another format, or it belongs to other weights.
    """
    if calibration is not None:
        calibration.check(model)
        return _int8(calibration)
    if isinstance(source, (str, os.PathLike)) and Path(source).suffix == ".safetensors":
        found = load_ranges(source, model)
        for entry in (found.get("int8"), *found.values()):
            if entry is not None and _has_int8(entry):
                return entry
        raise QuantizationError(f"{Path(source).name} is calibrated for {sorted(found)}, not int8")
    raise QuantizationError(
        "precision 'int8' needs calibration=, or a checkpoint that holds one; make it with "
        "fastswin.quant.calibrate"
    )


def graph_ranges(calibration: Calibration) -> Mapping[str, LayerRange]:
    """Ranges by layer name.

    Raises:
        QuantizationError: a layer's input has no static range.
    """
    for name, layer in calibration.layers.items():
        if layer.scheme.quantized and layer.scheme.activation != "per_tensor":
            raise QuantizationError(
                f"{name}: CPU runtimes need activation='per_tensor', the scheme "
                f"{calibration.scheme.name!r} says {layer.scheme.activation!r}"
            )
    return calibration.layers


def _int8(calibration: Calibration) -> Calibration:
    if not _has_int8(calibration):
        raise QuantizationError(
            f"precision 'int8' needs an int8 calibration, got scheme {calibration.scheme.name!r}"
        )
    return calibration


def _has_int8(calibration: Calibration) -> bool:
    formats = {layer.scheme.format for layer in calibration.layers.values()}
    return "int8" in formats and "fp8" not in formats
