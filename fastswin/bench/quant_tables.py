"""The table of the suite ``quant``: a row per model and batch, a column per precision.

model | batch | fp16 ms | int8 ms | over fp16 | fp8 ms | over fp16 | peak MiB of each
"""

from __future__ import annotations

from fastswin.bench.record import Document, Record
from fastswin.bench.tables import Table, short_commit

#: Columns, the one that ratios are taken over first.
PRECISIONS = ("fp16", "int8", "fp8")

HEADER = (
    "model", "batch", "fp16 ms", "int8 ms", "over fp16", "fp8 ms", "over fp16",
    "peak MiB fp16 / int8 / fp8",
)  # fmt: skip


def make_quant_table(document: Document) -> Table:
    """Latency of our engine by precision, and what 8 bits gain over half precision."""
    found: dict[tuple[str, int], dict[str, Record]] = {}
    for record in document["records"]:
        if record["variant"] == "fastswin":
            key = (record["case"], record["batch"])
            found.setdefault(key, {})[record["dtype"]] = record
    rows = []
    for (case, batch), records in sorted(found.items()):
        cells = [case, str(batch), _latency(records.get("fp16"))]
        for precision in PRECISIONS[1:]:
            record = records.get(precision)
            cells += [
                _latency(record),
                "-" if record is None else f"{record['over_fp16']:.2f}x",
            ]
        peaks = (records.get(precision) for precision in PRECISIONS)
        cells.append(" / ".join("-" if r is None else f"{r['peak_mib']:.0f}" for r in peaks))
        rows.append(tuple(cells))
    commits = sorted({short_commit(r["commit"]) for r in document["records"]})
    caption = (
        f"{document['gpu']}; torch {document['torch']}, Triton {document['triton']}; commit "
        f"{', '.join(commits)}; median in CUDA graphs, each checked before it was timed."
    )
    return Table(f"quant on {document['gpu']}", HEADER, tuple(rows), caption)


def _latency(record: Record | None) -> str:
    return "-" if record is None else f"{record['median_ms']:.3f}"
