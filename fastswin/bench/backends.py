"""``fastswin bench model --backends``: one model in several runtimes, speed beside difference.

    backend | folded | dtype | batch | median ms | images/s | speed-up over torch | max abs diff

A backend stands for the variants that show it; an export has a row with its constants folded and
one without, whose answers must agree.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastswin.bench.record import Document, Record
from fastswin.bench.tables import NO_VALUE, Table

#: Variants that each word of ``--backends`` stands for.
BACKENDS: dict[str, tuple[str, ...]] = {
    "torch": ("eager",),
    "compile": ("compile", "compile-reduce-overhead"),
    "onnxruntime": (
        "onnxruntime", "onnxruntime-unfolded", "fastswin-onnx", "fastswin-onnx-unfolded",
    ),
    "openvino": ("openvino", "openvino-unfolded"),
    "tensorrt": ("tensorrt", "tensorrt-unfolded"),
    "fastswin": ("fastswin", "fastswin-openvino", "fastswin-onnxruntime"),
}  # fmt: skip

#: Name of the record, whose table is :func:`make_backend_table`.
BACKEND_SUITE = "backends"

#: What a variant runs, for the table.
TITLES = {
    "eager": "PyTorch",
    "compile": "torch.compile",
    "compile-reduce-overhead": "torch.compile, CUDA graphs",
    "onnxruntime": "torch.onnx.export in ONNX Runtime",
    "fastswin-onnx": "fastswin export onnx in ONNX Runtime",
    "openvino": "openvino.convert_model",
    "tensorrt": "fastswin export onnx in TensorRT",
    "fastswin": "fastswin Engine, backend auto",
    "fastswin-openvino": "fastswin Engine, backend openvino",
    "fastswin-onnxruntime": "fastswin Engine, backend onnxruntime",
}

UNFOLDED = "-unfolded"


def backend_variants(names: Sequence[str]) -> list[str]:
    """Variants of some backends, in order.

    Raises:
        ValueError: an unknown name; the message lists the legal ones.
    """
    variants: list[str] = []
    for name in names:
        if name not in BACKENDS:
            raise ValueError(f"--backends must be among {', '.join(BACKENDS)}, got {name!r}")
        variants += BACKENDS[name]
    return list(dict.fromkeys(variants))


def make_backend_table(document: Document) -> Table:
    """One row per record, the fastest of each model, batch and precision last."""
    records = sorted(document["records"], key=_place)
    eager = {
        (r["case"], r["batch"]): r["median_ms"]
        for r in records
        if r["variant"] == "eager" and r["dtype"] == "fp32"
    }
    header = (
        "model", "runs in", "folded", "dtype", "batch", "ms", "images/s", "x torch fp32",
        "max abs diff",
    )  # fmt: skip
    rows = [_row(record, eager.get((record["case"], record["batch"]))) for record in records]
    caption = (
        f"{document['gpu']}; torch {document['torch']}; commit {document['commit'][:10]}; "
        f"{document['created']}. Median latency; difference of any logit from the fp32 model."
    )
    title = f"{document['suite']} by backend on {document['gpu']}"
    return Table(title, header, tuple(rows), caption)


def _row(record: Record, eager_ms: float | None) -> tuple[str, ...]:
    variant: str = record["variant"]
    title = TITLES.get(variant.removesuffix(UNFOLDED), variant)
    if record.get("backend"):
        title += f" ({record['backend']})"
    exported = variant.removesuffix(UNFOLDED) in ("onnxruntime", "openvino", "tensorrt")
    folded = NO_VALUE
    if variant.endswith(UNFOLDED):
        folded = "no"
    elif exported or variant == "fastswin-onnx":
        folded = "yes"
    median = record["median_ms"]
    return (
        record["case"],
        title,
        folded,
        record["dtype"],
        str(record["batch"]),
        f"{median:.4g}",
        f"{record['batch'] / median * 1e3:.1f}",
        NO_VALUE if eager_ms is None else f"{eager_ms / median:.2f}x",
        NO_VALUE if record.get("max_abs_err") is None else f"{record['max_abs_err']:.1e}",
    )


def _place(record: Record) -> tuple[str, int, float]:
    return record["case"], record["batch"], -record["median_ms"]
