"""The demonstration's report as one picture: images with answers, latency bars, parity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastswin.data.atomic import replacing

_COLUMNS = 6
_OURS, _OTHERS, _WRONG, _RIGHT = "#1b6ca8", "#b8bfc6", "#b3261e", "#222222"


def why_no_figure() -> str | None:
    """None where matplotlib is installed, else what to install."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return "matplotlib is not installed: pip install 'fastswin[plot]'"
    return None


def draw_report(report: dict[str, Any], images: np.ndarray, path: str | Path) -> None:
    """Draw the report into a PNG, atomically.

    Args:
        report: what :func:`fastswin.demo.run_demo` returns.
        images: uint8 ``[n, 28, 28]``, in the order of ``report["predictions"]``.
        path: the ``.png`` file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    cases = _cases(report["latency"])
    image_rows = -(-len(images) // _COLUMNS)
    heights = [1.25] * image_rows + [0.42 * len(rows) + 0.55 for rows in cases.values()]
    figure = Figure(figsize=(10, sum(heights) + 1.3), layout="constrained", dpi=120)
    figure.suptitle(_title(report), fontsize=11, ha="left", x=0.01)
    grid = figure.add_gridspec(len(heights), _COLUMNS, height_ratios=heights)
    for index, (image, row) in enumerate(zip(images, report["predictions"], strict=True)):
        axes = figure.add_subplot(grid[index // _COLUMNS, index % _COLUMNS])
        axes.imshow(image, cmap="gray_r")
        axes.set_axis_off()
        text = f"{row['predicted']} {row['probability']:.2f}"
        if not row["right"]:
            text += f"\n(is {row['label']})"
        axes.set_title(text, fontsize=8, color=_RIGHT if row["right"] else _WRONG)
    for offset, (title, rows) in enumerate(cases.items()):
        _bars(figure.add_subplot(grid[image_rows + offset, :]), title, rows)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def _title(report: dict[str, Any]) -> str:
    lines = [f"{report['model']} on {report['device']} (fastswin {report['fastswin']})"]
    if report["backend"]["backend"] != "torch":
        lines[0] += f", backend {report['backend']['backend']}"
    for name, row in report["parity"].items():
        lines.append(
            f"{name}: top-1 {row['top1_percent']:.2f} % of {row['images']} images, "
            f"agreement {row['agreement_percent']:.2f} %, max abs diff {row['max_abs_diff']:.1e}"
        )
    return "\n".join(lines)


def variant_name(row: dict[str, Any]) -> str:
    """The contender of a latency row, with the engine's backend where it has one."""
    return f"{row['variant']} ({row['backend']})" if row.get("backend") else row["variant"]


def _cases(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["status"] == "ok":
            title = f"{row['case']}, {row['dtype']}, batch {row['batch']}"
            cases.setdefault(title, []).append(row)
    return cases


def _bars(axes: Any, title: str, rows: list[dict[str, Any]]) -> None:
    rows = sorted(rows, key=lambda row: -row["median_ms"])
    medians = [row["median_ms"] for row in rows]
    spread = np.abs([[r["median_ms"] - r["p20_ms"], r["p80_ms"] - r["median_ms"]] for r in rows])
    widest = max(row["p80_ms"] for row in rows)
    axes.barh(
        [f"{variant_name(row)}  {row['median_ms']:.3g} ms" for row in rows],
        medians,
        xerr=spread.T,
        color=[_OURS if row["variant"] == "fastswin" else _OTHERS for row in rows],
        error_kw={"elinewidth": 1, "ecolor": "#555555"},
    )
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlim(0, max(widest, *medians) * 1.03)
    axes.set_xlabel("median latency (ms), lines from p20 to p80", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
