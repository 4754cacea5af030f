"""Tables of tuned choices, ready to be asked by the planner (the file: document.py).

A whole table is refused where its schema or card is another; a row where this version cannot run it
(unknown fields, illegal tiles, more shared memory than the card has) or where it was measured with
another Triton. A refused row means the heuristic, and the reason is kept; so does a row that whole
models gained nothing from. Looking up is a search in a sorted list: nothing is ever measured here.

A row answers for its own dtype and for those in its ``also``: fp16 and bf16 are the same bytes
through the same instructions, and the tuner has compiled and checked the twin
(bench/tune_twins.py).
"""

from __future__ import annotations

import bisect
import dataclasses
import os
from collections import Counter
from pathlib import Path
from typing import Any

from fastswin.tuning.card import SIBLINGS, Card
from fastswin.tuning.document import (
    ANSWERING,
    VERDICTS,
    Row,
    TableRefusedError,
    card_slug,
    check_head,
    minor_version,
    read_document,
    triton_version,
)
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

SHIPPED = Path(__file__).parents[1] / "assets" / "tuning"

Span = tuple[int, int, Any]


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
        self.num_unused = 0
        self._card, self._triton = card, minor_version(triton)
        self._spans: dict[tuple, list[Span]] = {}
        for row in document["configs"]:
            self._take(row, self._config_row)
        for row in document["choices"]:
            self._take(row, self._choice_row)
        for spans in self._spans.values():
            spans.sort(key=lambda span: span[0])
        self.num_rows = sum(len(found) for key, found in self._spans.items() if not key[0])
        self.models: list[Row] = [
            row
            for row in document["models"]
            if minor_version(row.get("triton", "none")) == self._triton
        ]

    def config(self, problem: KernelProblem) -> LaunchConfig | None:
        """The tuned configuration, None where the heuristic has to choose."""
        return self._find(("config", *problem.kernel), problem.rows)

    def choice(self, layer: LayerProblem) -> dict[str, Any] | None:
        """``{"choice": form, "latency_us": {form: time}}``, None where the heuristic has to."""
        return self._find(("choice", layer.layer, layer.dtype, layer.shape), layer.rows)

    def describe(self) -> str:
        """One line: origin, rows in use, and why others are not."""
        parts = [f"{self.origin}, {self.num_rows} rows"]
        if self.num_unused:
            parts.append(f"{self.num_unused} that no model gained from")
        parts += [f"{count} refused: {why}" for why, count in self.refused.items()]
        return "; ".join(parts)

    def _find(self, key: tuple, rows: int) -> Any:
        for twin in (False, True):  # rows of the dtype itself come first
            spans = self._spans.get((twin, *key), [])
            index = bisect.bisect_right(spans, rows, key=lambda span: span[0]) - 1
            if index >= 0 and rows <= spans[index][1]:
                return spans[index][2]
        return None

    def _take(self, row: Row, read: Any) -> None:
        try:
            if row["verdict"] not in VERDICTS:
                raise ValueError(f"unknown verdict {row['verdict']!r}")
            if row["verdict"] not in ANSWERING:
                self.num_unused += 1
                return
            if minor_version(row["triton"]) != self._triton:
                raise ValueError(f"measured with Triton {row['triton']}, this is {self._triton}")
            low, high = row["range"]
            if not 0 < low <= row["rows"] <= high:
                raise ValueError(f"range {row['range']} does not hold its {row['rows']} rows")
            answers = [read({**row, "dtype": dtype}) for dtype in self._dtypes(row)]
        except KeyError as error:
            self.refused[f"no field {error.args[0]!r}"] += 1
        except (ValueError, TypeError) as error:
            self.refused[str(error)] += 1
        else:
            for index, (key, value) in enumerate(answers):
                self._spans.setdefault((index > 0, *key), []).append((low, high, value))

    def _dtypes(self, row: Row) -> list[str]:
        """The row's own, and those it answers for as well."""
        also = row.get("also", [])
        if not isinstance(also, list) or not set(also) <= ITEMSIZE.keys():
            raise ValueError(f"also must list some of {', '.join(ITEMSIZE)}, got {also!r}")
        return [row["dtype"], *also]

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
        source: "auto" for the shipped table of this card or else of its sibling (card.py), "off"
            for none, or a path.
        card: the GPU.

    Raises:
        TableRefusedError: a table named by path does not apply; a shipped one is passed over and
            the line says why.
        FileNotFoundError: there is no file at the path.
    """
    if source == "off":
        return None, "off"
    automatic = source == "auto"
    path, measured, note = Path(source), card, ""
    if automatic:
        path = _shipped_path(card.name)
        if not path.exists() and (sibling := SIBLINGS.get(card.name)):
            path, measured = _shipped_path(sibling), dataclasses.replace(card, name=sibling)
            note = f"; measured on {sibling}, which has this card's multiprocessors"
        if not path.exists():
            return None, f"no table ships for {card.name}"
    try:
        table = TuningTable(read_document(path), measured, triton_version(), path.name)
    except TableRefusedError as error:
        if not automatic:
            raise
        return None, f"refused: {error}"
    return table, table.describe() + note


def _shipped_path(name: str) -> Path:
    return SHIPPED / f"{card_slug(name)}.json"
