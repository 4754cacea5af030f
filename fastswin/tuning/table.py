"""Tables of tuned choices: JSON that ``fastswin tune`` writes and the planner reads.

    {"schema": 1, "card": "NVIDIA H100 80GB HBM3", "capability": [9, 0],
     "configs": [{"op": "mlp", "dtype": "fp16", "triton": "3.6", "shape": {"C": 96, ...},
                  "rows": 100352, "range": [70960, 141919], "config": {"block_m": 128, ...},
                  "shared_bytes": 81920, "latency_us": 51.2, "default_us": 56.7}],
     "choices": [{"layer": "qkv", "dtype": "fp16", "triton": "3.6", "shape": {"C": 96, ...},
                  "rows": 100352, "range": [70960, 141919], "choice": "fused",
                  "latency_us": {"fused": 39.0, "library": 52.8, "tiled": 50.1}}]}

A row was measured at ``rows`` and answers for ``range``, up to halfway (in ratio) to its neighbours
and an eighth beyond the outermost. A whole table is refused where its schema or card is another;
a row where this version cannot run it (unknown fields, illegal tiles, more shared memory than the
card has) or where it was measured with another Triton. A refused row means the heuristic, and
the reason is kept. Looking up is a search in a sorted list: nothing is ever measured here.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastswin.tuning.card import Card
from fastswin.tuning.layers import CHOICES, LAYER_FIELDS, LayerProblem
from fastswin.tuning.problem import (
    CONFIG_TYPES,
    ITEMSIZE,
    KernelProblem,
    LaunchConfig,
    config_from_dict,
    make_problem,
)
from fastswin.tuning.space import why_invalid

#: Format of the file; raised when the meaning of a field changes.
SCHEMA = 1

#: How far beyond the largest and below the smallest measured rows an entry still answers.
OUTER_RATIO = 1.125

SHIPPED = Path(__file__).parents[1] / "assets" / "tuning"

Row = dict[str, Any]
Span = tuple[int, int, Any]


class TableRefusedError(ValueError):
    """A table that does not apply here; the message says why."""


class TuningTable:
    """Tuned configurations of one card, ready to be asked.

    Args:
        document: the parsed JSON.
        card: the GPU that the table is to serve.
        triton: version of the Triton that would run the configurations.
        origin: where the document came from, for messages.

    Raises:
        TableRefusedError: another schema or card, or no such document at all.
    """

    def __init__(self, document: dict, card: Card, triton: str, origin: str) -> None:
        check_head(document, card, origin)
        self.origin = origin
        self.refused: Counter[str] = Counter()
        self._card, self._triton = card, minor_version(triton)
        self._spans: dict[tuple, list[Span]] = {}
        for row in document["configs"]:
            self._take(row, self._config_row)
        for row in document["choices"]:
            self._take(row, self._choice_row)
        for spans in self._spans.values():
            spans.sort(key=lambda span: span[0])
        self.num_rows = sum(map(len, self._spans.values()))

    def config(self, problem: KernelProblem) -> LaunchConfig | None:
        """The tuned configuration, None where the heuristic has to choose."""
        return self._find(("config", *problem.kernel), problem.rows)

    def choice(self, layer: LayerProblem) -> dict[str, Any] | None:
        """``{"choice": form, "latency_us": {form: time}}``, None where the heuristic has to."""
        return self._find(("choice", layer.layer, layer.dtype, layer.shape), layer.rows)

    def describe(self) -> str:
        """One line: origin, rows in use, and why others are not."""
        refused = "; ".join(f"{count} refused: {why}" for why, count in self.refused.items())
        return f"{self.origin}, {self.num_rows} rows" + (f"; {refused}" if refused else "")

    def _find(self, key: tuple, rows: int) -> Any:
        spans = self._spans.get(key, [])
        index = bisect.bisect_right(spans, rows, key=lambda span: span[0]) - 1
        return spans[index][2] if index >= 0 and rows <= spans[index][1] else None

    def _take(self, row: Row, read: Any) -> None:
        try:
            if minor_version(row["triton"]) != self._triton:
                raise ValueError(f"measured with Triton {row['triton']}, this is {self._triton}")
            low, high = row["range"]
            if not 0 < low <= row["rows"] <= high:
                raise ValueError(f"range {row['range']} does not hold its {row['rows']} rows")
            key, value = read(row)
        except KeyError as error:
            self.refused[f"no field {error.args[0]!r}"] += 1
        except (ValueError, TypeError) as error:
            self.refused[str(error)] += 1
        else:
            self._spans.setdefault(key, []).append((low, high, value))

    def _config_row(self, row: Row) -> tuple[tuple, LaunchConfig]:
        if row["op"] not in CONFIG_TYPES:
            raise ValueError(f"unknown op {row['op']!r}")
        problem = make_problem(row["op"], row["dtype"], row["rows"], **row["shape"])
        config = config_from_dict(row["op"], row["config"])
        if why := why_invalid(problem, config, self._card.capability):
            raise ValueError(f"{row['op']}: {why}")
        if row["shared_bytes"] > self._card.shared_bytes:
            raise ValueError(
                f"{row['op']}: {row['shared_bytes']} bytes of shared memory exceed the card's "
                f"{self._card.shared_bytes}"
            )
        return ("config", *problem.kernel), config

    def _choice_row(self, row: Row) -> tuple[tuple, dict[str, Any]]:
        layer = row["layer"]
        if layer not in CHOICES:
            raise ValueError(f"unknown layer {layer!r}")
        if row["choice"] not in CHOICES[layer]:
            raise ValueError(f"{layer}: unknown choice {row['choice']!r}")
        if set(row["shape"]) != set(LAYER_FIELDS[layer]) or row["dtype"] not in ITEMSIZE:
            raise ValueError(f"{layer}: the shape is {', '.join(LAYER_FIELDS[layer])}")
        shape = tuple(int(row["shape"][name]) for name in LAYER_FIELDS[layer])
        value = {"choice": row["choice"], "latency_us": dict(row["latency_us"])}
        return ("choice", layer, row["dtype"], shape), value


def find_table(source: str | os.PathLike, card: Card) -> tuple[TuningTable | None, str]:
    """The table that an engine asks, and a line about it for its report.

    Args:
        source: "auto" for the shipped table of this card, "off" for none, or a path.
        card: the GPU.

    Raises:
        TableRefusedError: a table named by path does not apply; a shipped one is passed over and
            the line says why.
        FileNotFoundError: there is no file at the path.
    """
    if source == "off":
        return None, "off"
    automatic = source == "auto"
    path = SHIPPED / f"{card_slug(card.name)}.json" if automatic else Path(source)
    if automatic and not path.exists():
        return None, f"no table ships for {card.name}"
    try:
        table = TuningTable(read_document(path), card, triton_version(), path.name)
    except TableRefusedError as error:
        if not automatic:
            raise
        return None, f"refused: {error}"
    return table, table.describe()


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


def check_head(document: dict, card: Card, origin: str) -> None:
    """Raise TableRefusedError unless a document is a table of this schema and card."""
    schema = document.get("schema")
    if schema != SCHEMA:
        raise TableRefusedError(
            f"{origin} has schema {schema!r}, this version reads {SCHEMA}; run fastswin tune again"
        )
    if not all(isinstance(document.get(rows), list) for rows in ("configs", "choices")):
        raise TableRefusedError(f"{origin} lacks its lists 'configs' and 'choices'")
    found = document.get("card"), tuple(document.get("capability") or ())
    if found != (card.name, card.capability):
        raise TableRefusedError(f"{origin} was measured on {found[0]}, this is {card.name}")


def empty_document(card: Card) -> dict[str, Any]:
    """A table without rows."""
    return {
        "schema": SCHEMA, "card": card.name, "capability": list(card.capability), "configs": [],
        "choices": [],
    }  # fmt: skip


def format_document(document: dict[str, Any]) -> str:
    """JSON with one row a line."""
    head = {key: value for key, value in document.items() if key not in ("configs", "choices")}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key in ("configs", "choices"):
        rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in document[key])
        lines.append(f" {json.dumps(key)}: [\n{rows}\n ]" if rows else f" {json.dumps(key)}: []")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def merge_rows(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Old rows with new ones in their places, sorted, every range as the neighbours leave it."""
    merged = {_identity(row): row for row in [*old, *new]}
    groups: dict[str, list[Row]] = {}
    for identity in sorted(merged):
        groups.setdefault(identity[0], []).append(merged[identity])
    for rows in groups.values():
        for row, span in zip(rows, ranges([row["rows"] for row in rows]), strict=True):
            row["range"] = list(span)
    return [row for rows in groups.values() for row in rows]


def ranges(measured: list[int]) -> list[tuple[int, int]]:
    """The rows that each of ascending measured sizes answers for, without gaps or overlaps."""
    bounds = [int(measured[0] / OUTER_RATIO)]
    bounds += [math.isqrt(a * b) for a, b in itertools.pairwise(measured)]
    bounds += [int(measured[-1] * OUTER_RATIO)]
    spans = enumerate(itertools.pairwise(bounds))
    return [(low + 1 if index else max(1, low), high) for index, (low, high) in spans]


def _identity(row: Row) -> tuple[str, int]:
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
