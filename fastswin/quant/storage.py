"""Calibrated checkpoints and files of ranges.

    model.safetensors   weights, configuration, and the ranges in the metadata (fastswin_quant)
    ranges.json         the same ranges without the weights that they belong to

``fastswin_quant`` maps scheme names to calibrations, so one file serves several precisions. What a
file is calibrated for is told from that entry, never from its name.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fastswin.models import SwinTransformer, load_checkpoint, save_checkpoint
from fastswin.quant.files import sorted_header, write_whole
from fastswin.quant.ranges import Calibration, QuantizationError

#: Metadata key of the calibrations in a checkpoint, and the only key of a file of ranges.
QUANT_KEY = "fastswin_quant"


class QuantizedCheckpoint(NamedTuple):
    """A model, its calibrations by scheme name, and the file's other metadata."""

    model: SwinTransformer
    calibrations: dict[str, Calibration]
    metadata: dict[str, Any]


def save_quantized(
    model: SwinTransformer,
    calibrations: Calibration | Iterable[Calibration],
    path: str | os.PathLike[str],
    extra_metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write weights and calibrations to one ``.safetensors`` file.

    Args:
        model: the model that the calibrations were made for.
        calibrations: one, or several of different schemes.
        path: file that ends in ``.safetensors``; replaced only by a complete one.
        extra_metadata: JSON-ready values, such as preprocessing and class names.

    Returns:
        The path. Equal content gives equal bytes.

    Raises:
        QuantizationError: ranges of other weights, two schemes of one name, or none.
        ValueError: another suffix, or a reserved metadata key.
    """
    path = Path(path)
    extra = dict(extra_metadata or {})
    if QUANT_KEY in extra:
        raise ValueError(f"extra_metadata must not use the reserved key {QUANT_KEY!r}")
    if path.suffix != ".safetensors":
        raise ValueError(f"path must end in .safetensors, got {path}")
    entries = _entries(model, calibrations)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written = save_checkpoint(
            model, Path(folder) / "model.safetensors", {**extra, QUANT_KEY: entries}
        )
        write_whole(path, sorted_header(written.read_bytes()))
    return path


def load_quantized(path: str | os.PathLike[str]) -> QuantizedCheckpoint:
    """Read a checkpoint with its calibrations.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: not readable, or not a Swin.
        QuantizationError: no calibration inside, or one that does not fit the weights.
    """
    loaded = load_checkpoint(path)
    calibrations = calibrations_from(loaded.metadata, loaded.model)
    if not calibrations:
        raise QuantizationError(
            f"{path} holds no calibration; make one with quant.calibrate or fastswin calibrate"
        )
    rest = {key: value for key, value in loaded.metadata.items() if key != QUANT_KEY}
    return QuantizedCheckpoint(loaded.model, calibrations, rest)


def calibrations_from(
    metadata: Mapping[str, Any], model: SwinTransformer
) -> dict[str, Calibration]:
    """Calibrations by scheme name out of a checkpoint's metadata; empty where there are none.

    Raises:
        QuantizationError: malformed content, or ranges that do not fit the model.
    """
    entries = metadata.get(QUANT_KEY, {})
    if not isinstance(entries, Mapping):
        raise QuantizationError(f"{QUANT_KEY} must be an object, got {type(entries).__name__}")
    return {str(name): Calibration.from_dict(entry, model) for name, entry in entries.items()}


def save_ranges(
    model: SwinTransformer,
    calibrations: Calibration | Iterable[Calibration],
    path: str | os.PathLike[str],
) -> Path:
    """Write calibrations alone as JSON; arguments and errors as in :func:`save_quantized`."""
    path = Path(path)
    if path.suffix != ".json":
        raise ValueError(f"path must end in .json, got {path}")
    document = {QUANT_KEY: _entries(model, calibrations)}
    write_whole(path, (json.dumps(document, indent=1, sort_keys=True) + "\n").encode())
    return path


def load_ranges(path: str | os.PathLike[str], model: SwinTransformer) -> dict[str, Calibration]:
    """Calibrations by scheme name from what :func:`save_ranges` or :func:`save_quantized` wrote.

    Raises:
        FileNotFoundError: no such file.
        QuantizationError: no ranges in it, or ranges that do not fit the model.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        found = calibrations_from(load_checkpoint(path).metadata, model)
    else:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise QuantizationError(f"{path} is not JSON ({error})") from error
        found = calibrations_from(document if isinstance(document, dict) else {}, model)
    if not found:
        raise QuantizationError(f"{path} holds no calibration")
    return found


def _entries(
    model: SwinTransformer, calibrations: Calibration | Iterable[Calibration]
) -> dict[str, Any]:
    if isinstance(calibrations, Calibration):
        calibrations = [calibrations]
    entries: dict[str, Any] = {}
    for calibration in calibrations:
        calibration.check(model)
        if calibration.scheme.name in entries:
            raise QuantizationError(f"two calibrations are named {calibration.scheme.name!r}")
        entries[calibration.scheme.name] = calibration.to_dict()
    if not entries:
        raise QuantizationError("calibrations: give at least one")
    return entries
