"""What an engine is built of before its first call: a device, a tuning table, prepared weights."""

from __future__ import annotations

import os

import torch

from fastswin.engine.calibration import find_calibration
from fastswin.engine.forward import Forward
from fastswin.engine.precision import Precision
from fastswin.engine.prepare import prepare
from fastswin.engine.quantized.forward import QuantizedForward
from fastswin.engine.quantized.prepare import prepare_quantized
from fastswin.models.swin import SwinTransformer
from fastswin.quant.ranges import Calibration
from fastswin.tuning.card import card_of
from fastswin.tuning.table import TuningTable, find_table


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device of an engine, a GPU with its index; None takes a GPU where there is one.

    Raises:
        ValueError: neither a CPU nor a GPU that this machine has; the message names it.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device must be 'cuda', 'cuda:<index>' or 'cpu', got {device!r}"
        ) from error
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device 'cuda' was asked for but torch sees no GPU; use device='cpu'")
        index = torch.cuda.current_device() if resolved.index is None else resolved.index
        if index >= torch.cuda.device_count():
            raise ValueError(
                f"device cuda:{index} does not exist; there are {torch.cuda.device_count()} GPUs"
            )
        return torch.device("cuda", index)
    if resolved.type != "cpu":
        raise ValueError(f"device must be 'cuda', 'cuda:<index>' or 'cpu', got {device!r}")
    return resolved


def device_name(device: torch.device) -> str:
    """What a report calls the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def find_device_table(
    tuning: str | os.PathLike, device: torch.device
) -> tuple[TuningTable | None, str]:
    """The device's tuning table and a line about it; there are none for CPUs.

    Raises:
        ValueError: a path on a CPU; those of :func:`fastswin.tuning.table.find_table`.
    """
    if device.type != "cuda":
        if str(tuning) not in ("auto", "off"):
            raise ValueError(f"tuning={str(tuning)!r} is for GPUs, the engine is on {device}")
        return None, "off"
    return find_table(tuning, card_of(device))


def build_forward(
    model: SwinTransformer,
    source: str | os.PathLike | torch.nn.Module,
    calibration: Calibration | None,
    precision: Precision,
    device: torch.device,
) -> tuple[Forward, Calibration | None]:
    """The forward pass over a snapshot of a model's weights, and the ranges of a quantised one.

    Args:
        model: whose weights are packed.
        source: what it was read from, which may hold ranges.
        calibration: ranges that are given instead.

    Raises:
        QuantizationError: a quantised precision without ranges of these weights for every layer.
    """
    ranges = None
    if precision.quantized:
        ranges = find_calibration(source, model, calibration, precision.name)
        weights = prepare_quantized(model, ranges, device, precision.dtype)
    else:
        weights = prepare(model, device, precision.dtype, tf32=precision.tf32)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # other streams read the old weights, or these
    made = QuantizedForward if ranges is not None else Forward
    return made(model.config, weights, precision.wide), ranges
