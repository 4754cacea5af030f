"""Tables of what exports wrote: ONNX graphs and TensorRT-RTX engines, from their records.

    model | written as | nodes | plain export's | MiB | largest logit | max abs diff a batch
    model | dtype | engine for | graph | MiB | network layers | engine layers | build s

Seconds are those of the machine as it was, other work on it included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastswin.bench.record import Document, Record
from fastswin.bench.roofline import swin_flops
from fastswin.bench.tables import NO_VALUE, Table, short_commit
from fastswin.models import VARIANTS


def make_export_table(document: Document) -> Table:
    """One row a model and form, a column of differences a batch.

    A difference is the larger of the folded and the unfolded one.
    """
    records = document["records"]
    batches = sorted({record["batch"] for record in records})
    groups: dict[tuple[str, str], dict[int, Record]] = {}
    for record in records:
        key = (record["case"], record["variant"])
        groups.setdefault(key, {})[record["batch"]] = record
    header = (
        "model", "written as", "nodes", "plain export's", "MiB", "largest logit",
        *(f"b{batch}" for batch in batches),
    )  # fmt: skip
    rows = []
    for (case, variant), group in sorted(groups.items(), key=lambda item: _size(*item[0])):
        one = group[min(group)]
        attention, _, opset = variant.partition("-opset")
        rows.append(
            (
                case,
                f"{attention}, opset {opset}",
                str(one["nodes"]),
                NO_VALUE if one["plain_nodes"] is None else str(one["plain_nodes"]),
                f"{one['file_bytes'] / 2**20:.0f}",
                f"{max(record['max_abs_logit'] for record in group.values()):.1f}",
                *(_difference(group.get(batch)) for batch in batches),
            )
        )
    caption = (
        f"{_provenance(document, records)}. Nodes of the graph, and of torch.onnx.export of the "
        "framework's model; largest difference of any logit from the fp32 model at each batch, "
        "folded and unfolded."
    )
    return Table(f"exports checked on {document['gpu']}", header, tuple(rows), caption)


def make_engine_table(document: Document) -> Table:
    """One row an engine."""
    header = (
        "model", "dtype", "engine for", "graph", "MiB", "network layers", "engine layers",
        "build s",
    )  # fmt: skip
    records = sorted(document["records"], key=_engine_place)
    rows = [
        (
            record["case"],
            record["dtype"],
            " ".join(f"sm_{c}" for c in record["capabilities"]),
            "folded" if record["folded"] else "unfolded",
            f"{record['engine_bytes'] / 2**20:.1f}",
            str(sum(record["network_layers"].values())),
            str(sum(record["engine_layers"].values())),
            f"{record['build_s']:.1f}",
        )
        for record in records
    ]
    runtimes = sorted({record["runtime"] for record in records})
    caption = (
        f"{_provenance(document, records)}; {', '.join(runtimes)}. Built without a GPU; batches 1 "
        "to 32, tuned for 8."
    )
    return Table(f"engines built on {document['gpu']}", header, tuple(rows), caption)


def _difference(record: Record | None) -> str:
    if record is None:
        return NO_VALUE
    return f"{max(record['max_abs_err'], record['max_abs_err_unfolded']):.1e}"


def _size(case: str, variant: str) -> tuple[int, int, str, str]:
    """V1 first, then by the model's work."""
    config = VARIANTS.get(case)
    if config is None:
        return 0, 0, case, variant
    return config.version, swin_flops(config, 1), case, variant


def _engine_place(record: Record) -> tuple[Any, ...]:
    dtypes = ("fp32", "fp16", "int8")
    return (
        *_size(record["case"], "")[:3],
        dtypes.index(record["dtype"]),
        not record["folded"],
        len(record["capabilities"]),
        record["capabilities"],
    )


def _provenance(document: Document, records: Sequence[Record]) -> str:
    versions = sorted({record["torch"] for record in records})
    commits = sorted({short_commit(record["commit"]) for record in records})
    return (
        f"{document['gpu']}; torch {', '.join(versions)}; commit {', '.join(commits)}; "
        f"{document['created']}"
    )
