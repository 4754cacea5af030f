"""Which calibration serves a quantised precision: an argument, or the checkpoint's own.

A precision is a promise about formats. "int8" takes any int8 scheme but those that the two modes
are named after; "int8_mode1", "int8_mode2" and "fp8" take their preset, or one derived from it by
overrides of single layers. Ranges made for one are never used for another.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from fastswin.engine.precision import QUANTIZED
from fastswin.models import SwinTransformer
from fastswin.quant import PRESETS, Calibration, QuantizationError, load_ranges
from fastswin.quant.scheme import KINDS, Scheme


def find_calibration(
    source: str | os.PathLike[str] | torch.nn.Module,
    model: SwinTransformer,
    calibration: Calibration | None,
    precision: str,
) -> Calibration:
    """The calibration of a model for a precision.

    Args:
        source: what the engine was built from; a calibrated checkpoint brings its own.
        model: the readable model with the present weights.
        calibration: given by the user, or None.
        precision: "int8", "int8_mode1", "int8_mode2" or "fp8".

    Raises:
        QuantizationError: there is none, it is of another scheme, it belongs to other weights, or
            a layer lacks a legal range; the message names what is off.
    """
    if calibration is not None:
        calibration.check(model)
        if reason := why_not_serving(calibration.scheme, precision):
            raise QuantizationError(reason)
        return calibration
    if isinstance(source, (str, os.PathLike)) and Path(source).suffix == ".safetensors":
        found = load_ranges(source, model)
        for entry in (found.get(precision), *found.values()):
            if entry is not None and why_not_serving(entry.scheme, precision) is None:
                return entry
        raise QuantizationError(
            f"{Path(source).name} is calibrated for {sorted(found)}, not {precision}"
        )
    raise QuantizationError(
        f"precision {precision!r} needs calibration=, or a checkpoint that holds one; make it with "
        "fastswin.quant.calibrate"
    )


def precision_of(scheme: Scheme) -> str | None:
    """The precision that a scheme serves; None for one that mixes int8 and fp8."""
    return next((name for name in QUANTIZED if why_not_serving(scheme, name) is None), None)


def why_not_serving(scheme: Scheme, precision: str) -> str | None:
    """None where a scheme is what a precision promises, else the reason in one line."""
    format = QUANTIZED[precision]
    formats = {getattr(scheme, kind).format for kind in KINDS}
    formats |= {layer.format for _, layer in scheme.overrides}
    if format not in formats or formats - {format, "wide"}:
        return f"precision {precision!r} needs an {format} calibration, got scheme {scheme.name!r}"
    if precision in ("int8", "fp8"):
        mode = next((name for name in _MODES if _derived(scheme, PRESETS[name])), None)
        if mode is None:
            return None
        return (
            f"calibration: its scheme {scheme.name!r} is that of {mode}; use precision {mode!r}, "
            f"or calibrate for {precision!r}"
        )
    if _derived(scheme, PRESETS[precision]):
        return None
    return (
        f"precision {precision!r} needs ranges of its own preset, got scheme {scheme.name!r}; "
        f"calibrate for {precision!r}"
    )


_MODES = ("int8_mode1", "int8_mode2")


def _derived(scheme: Scheme, preset: Scheme) -> bool:
    """Whether a scheme is a preset but for overrides of single layers."""
    return all(getattr(scheme, kind) == getattr(preset, kind) for kind in KINDS)
