"""Options that several commands share, and what their text means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from fastswin.doctor import default_device

Model = Annotated[
    str | None,
    typer.Option("--model", help="Model name; see 'fastswin models'."),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option("--checkpoint", help="Weights of any supported layout."),
]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or cuda:N; default: a GPU if any.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def parse_device(text: str | None) -> torch.device:
    """The device that was asked for, or the default.

    Raises:
        ValueError: not a device name, or one that fastswin does not know.
        RuntimeError: a GPU that is not there.
    """
    if text is None:
        return default_device()
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {text!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RuntimeError(
            f"--device {text}: this machine has {torch.cuda.device_count()} usable GPUs "
            "(see fastswin doctor)"
        )
    return device


def split_list(values: list[str] | None, option: str) -> list[str]:
    """Values of a repeatable option that also takes commas, in order, without repeats.

    Raises:
        ValueError: an empty entry.
    """
    parts = [part.strip() for value in values or [] for part in value.split(",")]
    if not all(parts):
        raise ValueError(f"{option} has an empty entry")
    return list(dict.fromkeys(parts))


def split_numbers(values: list[str] | None, option: str) -> list[int]:
    """Like :func:`split_list`, for positive integers."""
    numbers = []
    for part in split_list(values, option):
        if not part.isdigit() or int(part) < 1:
            raise ValueError(f"{option} must hold positive integers, got {part!r}")
        numbers.append(int(part))
    return numbers


def parse_image_size(text: str | None) -> int | tuple[int, int] | None:
    """``224`` or ``224x288`` (height, width) in pixels; None stays None.

    Raises:
        ValueError: neither.
    """
    if text is None:
        return None
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdigit() and int(side) for side in sides):
        raise ValueError(f"--image-size must be like 224 or 224x288, got {text!r}")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))
