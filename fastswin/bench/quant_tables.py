"""The table of the suite ``quant``: a row per model and batch, a column per precision.

model | batch | fp16 ms | int8 ms | over fp16 | fp8 ms | over fp16 | compiled fp16 ms | peak and
weights MiB of each
"""

from __future__ import annotations

from fastswin.bench.record import Document, Record
from fastswin.bench.tables import Table, short_commit

#: What others make of the model in half precision.
COMPILED = "compile-reduce-overhead"

#: Columns, the one that ratios are taken over first.
PRECISIONS = ("fp16", "int8", "fp8")

HEADER = (
    "model", "batch", "fp16 ms", "int8 ms", "over fp16", "fp8 ms", "over fp16",
    "compiled fp16 ms", "peak MiB fp16 / int8 / fp8", "weights MiB",
)  # fmt: skip


def make_quant_table(document: Document) -> Table:
    """Latency of our engine by precision, and what 8 bits gain over half precision."""
    found: dict[tuple[str, int], dict[str, Record]] = {}
    compiled: dict[tuple[str, int], Record] = {}
    for record in document["records"]:
        key = (record["case"], record["batch"])
        if record["variant"] == "fastswin":
            found.setdefault(key, {})[record["dtype"]] = record
        elif (record["variant"], record["dtype"]) == (COMPILED, "fp16"):
            compiled[key] = record
    rows = []
    for (case, batch), records in sorted(found.items()):
        cells = [case, str(batch), _latency(records.get("fp16"))]
        for precision in PRECISIONS[1:]:
            record = records.get(precision)
            cells += [
                _latency(record),
                "-" if record is None else f"{record['over_fp16']:.2f}x",
            ]
        cells.append(_latency(compiled.get((case, batch))))
        of_each = [records.get(precision) for precision in PRECISIONS]
        cells += [_each(of_each, "peak_mib"), _each(of_each, "weights_mib")]
        rows.append(tuple(cells))
    commits = sorted({short_commit(r["commit"]) for r in document["records"]})
    caption = (
        f"{document['gpu']}; torch {document['torch']}, Triton {document['triton']}; commit "
        f"{', '.join(commits)}; median in CUDA graphs, each checked before it was timed."
    )
    return Table(f"quant on {document['gpu']}", HEADER, tuple(rows), caption)


def _each(records: list[Record | None], field: str) -> str:
    """A number of every precision, "-" where there is none."""
    found = [None if record is None else record.get(field) for record in records]
    return " / ".join("-" if value is None else f"{float(value):.0f}" for value in found)


def _latency(record: Record | None) -> str:
    return "-" if record is None else f"{record['median_ms']:.3f}"
