"""Startup records to a table: seconds to the first logits, and the parts that they are made of.

start | dtype | batch | variant | s | over fastswin | import | context | load | first call
"""

from __future__ import annotations

from collections.abc import Sequence

from fastswin.bench.record import Document, Record
from fastswin.bench.tables import NO_VALUE, VARIANT_ORDER, Table, short_commit

#: Parts of a start, in the order of time.
PARTS = ("import", "context", "load", "first_call")

#: Names of the columns.
HEADER = (
    "start", "dtype", "batch", "variant", "s", "over fastswin",
    *(f"{part.replace('_', ' ')} s" for part in PARTS),
)  # fmt: skip


def startup_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """A row per start and variant, fastswin first."""
    ours_ms = {_start(r): r["median_ms"] for r in records if r["variant"] == "fastswin"}
    rows = []
    for record in sorted(records, key=lambda r: (*_start(r), _order(r["variant"]))):
        own_ms = ours_ms.get(_start(record))
        parts = (record.get(f"{part}_s") for part in PARTS)
        case, dtype, batch = _start(record)
        rows.append(
            (
                case, dtype, str(batch), record["variant"], f"{record['median_ms'] / 1e3:.2f}",
                NO_VALUE if own_ms is None else f"{record['median_ms'] / own_ms:.2f}x",
                *(NO_VALUE if seconds is None else f"{seconds:.2f}" for seconds in parts),
            )
        )  # fmt: skip
    return rows


def make_startup_table(document: Document) -> Table:
    """The table of a card's starts."""
    records = document["records"]
    commits = sorted({short_commit(r.get("commit", document["commit"])) for r in records})
    return Table(
        f"{document['suite']} on {document['gpu']}",
        HEADER,
        tuple(startup_rows(records)),
        f"{document['gpu']}; torch {document['torch']}; commit {', '.join(commits)}; from starting "
        "Python to the first logits, checked; warm: the median of several starts.",
    )


def _start(record: Record) -> tuple[str, str, int]:
    return record["case"], record["dtype"], record["batch"]


def _order(variant: str) -> int:
    return VARIANT_ORDER.index(variant) if variant in VARIANT_ORDER else len(VARIANT_ORDER)
