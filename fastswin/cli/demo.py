"""``fastswin demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastswin.cli.exit_codes import CheckFailedError
from fastswin.cli.options import Device, Json, parse_device
from fastswin.cli.output import Progress, note, print_json, print_table
from fastswin.demo import run_demo
from fastswin.demo.figure import variant_name


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("fastswin-demo"),
    device: Device = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Compare on the first N images only.")
    ] = None,
    latency: Annotated[bool, typer.Option(help="Time the contenders.")] = True,
    json: Json = False,
) -> None:
    """Run the whole job once on shipped data; write a report."""
    with Progress("demo", limit or 2000) as progress:
        report = run_demo(
            out,
            parse_device(device),
            say=progress.say,
            on_batch=progress.advance,
            limit=limit,
            latency=latency,
        )
    if json:
        print_json(report)
    else:
        _print_report(report, out)
    for line in report["failures"][1:]:
        note(f"fastswin: check failed: {line}")
    if report["failures"]:
        raise CheckFailedError(report["failures"][0])


def _print_report(report: dict, out: Path) -> None:
    print_table(
        f"{report['model']} on {report['device']}: the first images of the test set",
        ("image", "is", "predicted", "", "probability"),
        [
            (p["index"], p["label"], p["predicted"], "" if p["right"] else "wrong",
             f"{p['probability']:.3f}")
            for p in report["predictions"]
        ],
        left=4,
    )  # fmt: skip
    backend = report["backend"]
    if report["device"].startswith("cpu"):
        print(f"backend {backend['backend']}, {backend['compute']} products: {backend['reason']}")
    print_table(
        f"parity with the readable fp32 model: {report['data']}",
        ("engine", "images", "top-1 %", "agreement %", "max abs diff"),
        [
            (name, row["images"], f"{row['top1_percent']:.2f}",
             f"{row['agreement_percent']:.2f}", f"{row['max_abs_diff']:.2e}")
            for name, row in report["parity"].items()
        ],
    )  # fmt: skip
    print_table(
        "latency",
        ("model", "dtype", "batch", "contender", "median ms", "p20", "p80", "graph", "max abs err"),
        [_latency_row(row) for row in report["latency"]],
        left=4,
    )
    figure = "report.png" if report["figure"] else f"no picture: {report['figure_reason']}"
    print(f"wrote {out / 'report.json'}; {figure}; {report['seconds']:.0f} s")


def _latency_row(row: dict) -> tuple:
    head = (row["case"], row["dtype"], row["batch"], variant_name(row))
    if row["status"] != "ok":
        return (*head, row["status"], row["message"], "", "", "")
    times = (f"{row[key]:.4g}" for key in ("median_ms", "p20_ms", "p80_ms"))
    return (*head, *times, "yes" if row["graph"] else "no", f"{row['max_abs_err']:.1e}")
