"""A bar chart of latencies as PNG; needs ``pip install 'fastswin[plot]'``."""

from __future__ import annotations

from pathlib import Path

from fastswin.bench.record import Document
from fastswin.bench.tables import VARIANT_ORDER


def latency_chart(document: Document, path: str | Path, *, case: str, dtype: str) -> None:
    """Draw ms per image against batch, one bar per variant, to ``path``.

    Args:
        document: as stored.
        path: PNG file to write.
        case: model name.
        dtype: precision.

    Raises:
        ImportError: matplotlib is absent.
        ValueError: no record of that case and dtype.
    """
    records = [r for r in document["records"] if r["case"] == case and r["dtype"] == dtype]
    if not records:
        raise ValueError(f"no record of case {case!r} with dtype {dtype!r} to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing charts needs matplotlib: pip install 'fastswin[plot]'"
        ) from error
    batches = sorted({record["batch"] for record in records})
    variants = [v for v in VARIANT_ORDER if any(r["variant"] == v for r in records)]
    width = 0.8 / len(variants)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, variant in enumerate(variants):
        latency_ms = {r["batch"]: r["median_ms"] for r in records if r["variant"] == variant}
        found = [b for b in batches if b in latency_ms]
        places = [batches.index(b) + (index - (len(variants) - 1) / 2) * width for b in found]
        bars = axes.bar(places, [latency_ms[b] / b for b in found], width, label=variant)
        axes.bar_label(bars, labels=[f"{latency_ms[b]:.3g}" for b in found], fontsize=7)
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_yscale("log")
    axes.set_xlabel("batch (images per call); labels: ms per call")
    axes.set_ylabel("ms per image (log)")
    axes.set_title(f"{case} {dtype}, {document['gpu']}")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
