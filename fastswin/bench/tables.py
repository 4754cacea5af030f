"""Record documents to tables: one row per (model, dtype, batch), the same everywhere.

    model | dtype | batch | ms per variant | speed-up | % of roofline | max abs err | img/s
    case  | dtype | batch | direction | ms per variant | speed-up | % of roofline | max abs err

Speed-up is ``compile-reduce-overhead`` over ``fastswin`` (over the fastest other contender where
that one is absent, and then marked). Roofline, error and img/s are those of ``fastswin``. The
second form is that of suites with a backward or a step. ``copy``, a device copy of a problem's
bytes, is no contender: it has a column of its own, its time as percent of ``fastswin``'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fastswin.bench.record import Document, Record
from fastswin.bench.roofline import swin_flops
from fastswin.models import VARIANTS

#: Column order of the variants.
VARIANT_ORDER = (
    "fastswin",
    "compile-reduce-overhead",
    "compile",
    "eager-graph",
    "jit-trace",
    "eager",
    "onnxruntime",
    "openvino",
    "tensorrt",
)

DTYPE_ORDER = ("fp32", "tf32", "fp16", "bf16", "int8", "int8_mode1", "int8_mode2", "fp8")

#: The contender that speed-ups are taken over.
BASELINE = "compile-reduce-overhead"

#: A device copy of as many bytes: a bound, not a contender.
COPY = "copy"

NO_VALUE = "-"

#: case, dtype, batch, direction
Key = tuple[str, str, int, str]


@dataclasses.dataclass(frozen=True)
class Table:
    """Text cells, ready for any renderer.

    Attributes:
        title: suite and card.
        header: column names.
        rows: cells, as many per row as the header has.
        caption: versions, commits and method in one line.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str


def filter_records(document: Document, filters: Mapping[str, Sequence[str]]) -> Document:
    """A document with those records alone whose fields have one of the values given for them.

    Args:
        document: as stored; not modified.
        filters: per field of a record ("case", "dtype", "batch", "variant") the values to keep.
    """

    def kept(record: Record) -> bool:
        return all(str(record.get(field)) in values for field, values in filters.items())

    return {**document, "records": [r for r in document["records"] if kept(r)]}


def make_table(document: Document) -> Table:
    """Build the usual table of one document."""
    records = document["records"]
    found = {record["variant"] for record in records}
    variants = [v for v in VARIANT_ORDER if v in found] + sorted(found - {*VARIANT_ORDER, COPY})
    groups: dict[Key, dict[str, Record]] = {}
    for record in records:
        direction = record.get("direction", "forward")
        key = (record["case"], record["dtype"], record["batch"], direction)
        groups.setdefault(key, {})[record["variant"]] = record
    directed = any(direction != "forward" for *_, direction in groups)
    columns = ["case" if directed else "model", "dtype", "batch"]
    columns += ["direction"] if directed else []
    columns += [f"{v} ms" for v in variants]
    columns += ["speed-up", "% of roofline"]
    columns += ["% of its copy"] if COPY in found else []
    columns += ["max abs err", *([] if directed else ["img/s"])]
    rows = [
        _row(key, groups[key], variants, directed, COPY in found)
        for key in sorted(groups, key=_place)
    ]
    return Table(
        f"{document['suite']} on {document['gpu']}",
        tuple(columns),
        tuple(rows),
        _caption(document, records),
    )


def to_markdown(table: Table) -> str:
    """Pipe table with its caption below; numbers right-aligned."""
    if not table.rows:
        return f"No records for {table.title}."
    lines = [_pipe(table.header), _pipe(["---", "---", *["---:"] * (len(table.header) - 2)])]
    lines += [_pipe(row) for row in table.rows]
    return "\n".join([*lines, "", table.caption])


def to_text(table: Table) -> str:
    """Aligned columns for a terminal without rich."""
    cells = [table.header, *table.rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.header))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in cells]
    return "\n".join([table.title, *lines, table.caption])


def print_table(table: Table) -> None:
    """Print with rich where it is installed and the terminal wide enough, else as plain text."""
    text = to_text(table)
    width = max(len(line) for line in text.splitlines()[:-1])
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        print(text)
        return
    console = Console()
    if not console.is_terminal or console.width < width + len(table.header) + 1:
        print(text)  # a wrapped number is unreadable
        return
    rich_table = RichTable(title=table.title, caption=table.caption)
    for index, name in enumerate(table.header):
        rich_table.add_column(name, justify="left" if index < 2 else "right", no_wrap=True)
    for row in table.rows:
        rich_table.add_row(*row)
    console.print(rich_table)


def _place(key: Key) -> tuple[int, str, int, str, int, str]:
    """Sorts rows by model size, then precision, batch and direction, forward first."""
    case, dtype, batch, direction = key
    config = VARIANTS.get(case.partition(".")[0])
    size = swin_flops(config, 1) if config else 0
    order = DTYPE_ORDER.index(dtype) if dtype in DTYPE_ORDER else len(DTYPE_ORDER)
    return size, case, order, dtype, batch, "" if direction == "forward" else direction


def _row(
    key: Key, group: Mapping[str, Record], variants: Sequence[str], directed: bool, copied: bool
) -> tuple[str, ...]:
    case, dtype, batch, direction = key
    times = [_number(group.get(variant, {}).get("median_ms")) for variant in variants]
    ours = group.get("fastswin", {})
    roofline = NO_VALUE
    if ours.get("roofline_ms"):
        roofline = f"{100 * ours['roofline_ms'] / ours['median_ms']:.0f}"
    of_copy = NO_VALUE
    if ours and COPY in group:
        of_copy = f"{100 * group[COPY]['median_ms'] / ours['median_ms']:.0f}"
    error = ours.get("max_abs_err")
    throughput = ours.get("images_per_s")
    if ours and throughput is None:
        throughput = batch / ours["median_ms"] * 1e3
    return (
        case,
        dtype,
        str(batch),
        *([direction] if directed else []),
        *times,
        _speed_up(group),
        roofline,
        *([of_copy] if copied else []),
        NO_VALUE if error is None else f"{error:.1e}",
        *([] if directed else [NO_VALUE if throughput is None else f"{throughput:.0f}"]),
    )


def _speed_up(group: Mapping[str, Record]) -> str:
    ours = group.get("fastswin")
    if ours is None:
        return NO_VALUE
    if BASELINE in group:
        return f"{group[BASELINE]['median_ms'] / ours['median_ms']:.2f}x"
    others = {name: r["median_ms"] for name, r in group.items() if name not in ("fastswin", COPY)}
    if not others:
        return NO_VALUE
    best = min(others, key=lambda name: others[name])
    return f"{others[best] / ours['median_ms']:.2f}x ({best})"


def _caption(document: Document, records: Sequence[Record]) -> str:
    commits = sorted({short_commit(record.get("commit", document["commit"])) for record in records})
    versions = sorted(
        {
            f"torch {record.get('torch', document['torch'])}"
            + (f", Triton {triton}" if (triton := record.get("triton", document["triton"])) else "")
            for record in records
        }
    )
    ceilings = (
        f"copy {document['copy_tbs']} TB/s, GEMM {document['gemm_tflops']} TFLOP/s in the last run"
    )
    return (
        f"{document['gpu']}; {' / '.join(versions) or 'torch ' + document['torch']}; commit "
        f"{', '.join(commits) or short_commit(document['commit'])}; {document['created']}; "
        f"{ceilings}. "
        f"Median latency in ms; speed-up of fastswin over {BASELINE}."
    )


def short_commit(commit: Any) -> str:
    """The first ten digits, and ``-dirty`` where it is."""
    head, dash, rest = str(commit).partition("-")
    return head[:10] + dash + rest


def _number(value: Any) -> str:
    if value is None:
        return NO_VALUE
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _pipe(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
