"""Tables that several processes measured on the same kind of card, as one; and what ships of it.

    verdicts     a loss anywhere outweighs gains elsewhere; a gain outweighs what was not asked
    conflicts    the same launch twice: the row of the heavier verdict; of equal ones that which is
                 faster by its own ratio to the heuristic's time of the same run, forms of a layer
                 by the ratio to the next best form

Times of different runs are not compared with each other: clocks differ from card to card.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastswin.tuning.document import (
    ANSWERING,
    Row,
    TableRefusedError,
    check_schema,
    identity,
    merge_rows,
    minor_version,
)

#: Verdicts by weight: the first that any of the merged rows has counts.
WEIGHT = ("loss", "gain", "taken", "none", "untried")


def merge_documents(documents: Sequence[tuple[str, dict]]) -> tuple[dict[str, Any], list[str]]:
    """One table of several, and a line for every conflict.

    Args:
        documents: origin, for messages, and parsed JSON, as ``fastswin tune`` wrote it.

    Raises:
        TableRefusedError: another schema, another card than the first's, or a table that holds
            answering rows alone, whose ranges can not be told any more.
    """
    first_origin, first = documents[0]
    for origin, document in documents:
        check_schema(document, origin)
        if (document["card"], document["capability"]) != (first["card"], first["capability"]):
            raise TableRefusedError(
                f"{origin} was measured on {document['card']}, {first_origin} on {first['card']}"
            )
        if document.get("answering_rows_only"):
            raise TableRefusedError(f"{origin} is what ships; merge the tables that tune wrote")
    merged = {**first}
    conflicts: list[str] = []
    for name in ("configs", "choices"):
        found: dict[tuple, Row] = {}
        for origin, document in documents:
            for row in document[name]:
                key = identity(row)
                if key in found:
                    found[key], line = _settle(found[key], row, origin)
                    conflicts += [line] if line else []
                else:
                    found[key] = dict(row)
        merged[name] = merge_rows((), found.values())
    models = {
        (m["model"], m["batch"], m["dtype"], minor_version(m["triton"])): m
        for _, document in documents
        for m in document["models"]
    }
    merged["models"] = [models[key] for key in sorted(models)]
    return merged, conflicts


def shipped(document: dict[str, Any]) -> dict[str, Any]:
    """What the planner takes of a table: rows that answer, with their ranges, and the models."""
    answering = {
        name: [row for row in document[name] if row.get("verdict") in ANSWERING]
        for name in ("configs", "choices")
    }
    return {**document, **answering, "answering_rows_only": True}


def verdict_of(verdicts: Iterable[str]) -> str:
    """The verdict of a row by those of everybody who was asked."""
    said = set(verdicts)
    return next((word for word in WEIGHT if word in said), "untried")


def _settle(a: Row, b: Row, origin: str) -> tuple[Row, str]:
    """The better of two rows of the same launch or layer, with the verdict of both."""
    best = min(a, b, key=lambda row: (WEIGHT.index(row["verdict"]), _ratio(row)))
    differs = a.get("config") != b.get("config") or a.get("choice") != b.get("choice")
    settled = {**best, "verdict": verdict_of(row["verdict"] for row in (a, b))}
    if not differs:
        return settled, ""
    kind = best.get("op") or f"layer {best['layer']}"
    chosen = best.get("config") or best.get("choice")
    return settled, (
        f"{kind} {best['dtype']} rows={best['rows']} {best['shape']}: {chosen} "
        f"(of {_ratio(a):.3f} and, in {origin}, {_ratio(b):.3f} of the alternative's time), "
        f"verdict {settled['verdict']}"
    )


def _ratio(row: Row) -> float:
    """A row's time by its own run's alternative: the heuristic's, or the next best form's."""
    if "layer" in row:
        others = [us for form, us in row["latency_us"].items() if form != row["choice"]]
        return row["latency_us"].get(row["choice"], 0.0) / min(others, default=1.0)
    return row["latency_us"] / row["default_us"] if row["default_us"] else 0.0
