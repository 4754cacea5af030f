"""The file of a tuning table: JSON that ``fastswin tune`` writes.

    {"schema": 2, "card": "NVIDIA H100 80GB HBM3", "capability": [9, 0],
     "models": [{"model": "swin_tiny_patch4_window7_224", "batch": 32, "dtype": "fp16",
                 "triton": "3.6", "heuristic_ms": 1.13, "tuned_ms": 1.10, "rows": 5}],
     "configs": [{"op": "mlp", "dtype": "fp16", "triton": "3.6", "shape": {"C": 96, ...},
                  "rows": 100352, "range": [70960, 112896], "config": {"block_m": 128, ...},
                  "shared_bytes": 81920, "latency_us": 51.2, "default_us": 56.7,
                  "verdict": "gain", "also": ["bf16"]}],
     "choices": [{"layer": "qkv", "dtype": "fp16", "triton": "3.6", "shape": {"C": 96, ...},
                  "rows": 100352, "range": [70960, 112896], "choice": "fused",
                  "latency_us": {"fused": 39.0, "library": 52.8, "tiled": 50.1},
                  "verdict": "gain", "also": ["bf16"]}]}

A row was measured at ``rows`` and answers for ``range``: up to halfway (in ratio) to its
neighbours, at most a factor of 1.41, and an eighth beyond the outermost.

The times of launches apart only propose; ``verdict`` says what whole models made of a row:

    "gain"    a model became faster with it and none slower: the planner takes it
    "taken"   no model was asked (``--no-compare``): the planner takes it
    "none"    no model became faster, or none was expected to
    "loss"    a model became slower
    "untried" the run was over before a model was asked
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastswin.tuning.card import Card

#: Format of the file; raised when the meaning of a field changes.
SCHEMA = 2

#: How far beyond the largest and below the smallest measured rows an entry still answers.
OUTER_RATIO = 1.125

#: How far at most towards a neighbour: half of a step of the engine's ladder of batches.
INNER_RATIO = math.sqrt(2)

#: Verdicts of rows, and those whose rows the planner takes.
VERDICTS = ("gain", "taken", "none", "loss", "untried")
ANSWERING = frozenset(("gain", "taken"))

Row = dict[str, Any]


class TableRefusedError(ValueError):
    """A table that does not apply here; the message says why."""


def read_document(path: Path) -> dict:
    """Parsed JSON of a table.

    Raises:
        TableRefusedError: the file is no JSON object.
        FileNotFoundError: there is no such file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TableRefusedError(f"{path.name} is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise TableRefusedError(f"{path.name} is no tuning table")
    return document


def check_schema(document: dict, origin: str) -> None:
    """Raise TableRefusedError unless a document is a table that this version reads."""
    schema = document.get("schema")
    if schema != SCHEMA:
        raise TableRefusedError(
            f"{origin} has schema {schema!r}, this version reads {SCHEMA}; run fastswin tune again"
        )
    lists = ("models", "configs", "choices")
    if not all(isinstance(document.get(name), list) for name in lists):
        raise TableRefusedError(f"{origin} lacks its lists 'models', 'configs' and 'choices'")


def check_head(document: dict, card: Card, origin: str) -> None:
    """Raise TableRefusedError unless a document is a table of this schema and card."""
    check_schema(document, origin)
    found = document.get("card"), tuple(document.get("capability") or ())
    if found != (card.name, card.capability):
        raise TableRefusedError(f"{origin} was measured on {found[0]}, this is {card.name}")


def empty_document(card: Card) -> dict[str, Any]:
    """A table without rows."""
    return {
        "schema": SCHEMA, "card": card.name, "capability": list(card.capability), "models": [],
        "configs": [], "choices": [],
    }  # fmt: skip


def format_document(document: dict[str, Any]) -> str:
    """JSON with one row a line."""
    lists = ("models", "configs", "choices")
    head = {key: value for key, value in document.items() if key not in lists}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key in lists:
        rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in document[key])
        lines.append(f" {json.dumps(key)}: [\n{rows}\n ]" if rows else f" {json.dumps(key)}: []")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def merge_rows(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Old rows with new ones in their places, sorted, every range as the neighbours leave it."""
    merged = {identity(row): row for row in [*old, *new]}
    groups: dict[str, list[Row]] = {}
    for key in sorted(merged):
        groups.setdefault(key[0], []).append(merged[key])
    for rows in groups.values():
        for row, span in zip(rows, ranges([row["rows"] for row in rows]), strict=True):
            row["range"] = list(span)
    return [row for rows in groups.values() for row in rows]


def ranges(measured: list[int]) -> list[tuple[int, int]]:
    """The rows that each of ascending measured sizes answers for, without overlaps."""
    low = [math.ceil(measured[0] / OUTER_RATIO)]
    high = []
    for a, b in itertools.pairwise(measured):
        middle = math.isqrt(a * b)
        high.append(max(a, min(middle, int(a * INNER_RATIO))))
        low.append(max(middle + 1, math.ceil(b / INNER_RATIO)))
    high.append(int(measured[-1] * OUTER_RATIO))
    return list(zip(low, high, strict=True))


def identity(row: Row) -> tuple[str, int]:
    """What a row is for, and its rows: equal for two measurements of the same."""
    kind = row.get("op") or row["layer"]
    return json.dumps([kind, row["dtype"], minor_version(row["triton"]), row["shape"]]), row["rows"]


def triton_version() -> str:
    """Version of the installed Triton; "none" matches no row."""
    try:
        import triton
    except ImportError:
        return "none"
    return triton.__version__


def minor_version(version: str) -> str:
    """``3.6.0+git`` is ``3.6``: code generation changes between minor versions."""
    return ".".join(version.split(".")[:2])


def card_slug(name: str) -> str:
    """File name of a card: ``NVIDIA H100 80GB HBM3`` is ``nvidia-h100-80gb-hbm3``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
