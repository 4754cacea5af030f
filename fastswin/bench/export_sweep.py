"""Every published Swin through ``fastswin export onnx``: what is written, and how far it is off.

    python -m fastswin.bench.export_sweep --deadline-s 3000
    python -m fastswin.bench.export_sweep --models swin_large_patch4_window12_384 --batches 1,2

Weights are seeded and perturbed (bench/source.py), so that logits reach 3 to 5 and no norm, bias or
position table is at a default. Each export is compared with the fp32 model in ONNX Runtime, folded
and unfolded, by the check of the export itself: a difference beyond 1e-4, whatever the logits'
size, is a fault. The record says what was written and the difference at each batch, and how many
nodes ``torch.onnx.export`` makes of timm's model, for one batch and with its own optimiser on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import io
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fastswin.bench.problems import Problem, parse_batches, parse_names
from fastswin.bench.record import (
    DEFAULT_ROOT,
    Record,
    RunInfo,
    make_run_info,
    result_path,
    save_records,
    stamp,
)
from fastswin.bench.source import Source, build_source
from fastswin.bench.suites import measure_device
from fastswin.export.onnx import ExportReport, ParityError, export_onnx
from fastswin.export.parity import BATCHES
from fastswin.models import VARIANTS, list_models
from fastswin.models.config import SwinConfig

SUITE = "export"

#: Ways to write a graph: what anybody runs, and the newest with ONNX's own attention.
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"attention": "plain", "opset": 20},
    "newest": {"attention": "standard", "opset": "newest"},
}

#: Models that get every form; the others get "plain".
ALL_FORMS = ("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256")

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """One model to export.

    Attributes:
        name: for the record.
        config: None looks ``name`` up.
        forms: keys of :data:`FORMS`.
    """

    name: str
    config: SwinConfig | None = None
    forms: tuple[str, ...] = ("plain",)


def default_cases(names: Sequence[str]) -> list[Case]:
    """Cases of named variants, in order of their size."""
    ordered = sorted(names, key=lambda n: (_tokens(VARIANTS[n]), n))
    return [Case(n, forms=tuple(FORMS) if n in ALL_FORMS else ("plain",)) for n in ordered]


def run_sweep(
    cases: Sequence[Case],
    *,
    batches: Sequence[int] = BATCHES,
    out: Path = DEFAULT_ROOT,
    deadline_s: float | None = None,
    say: Say = print,
) -> list[str]:
    """Export, compare and record, one model after the other.

    Args:
        cases: what to export.
        batches: batch sizes to compare at.
        out: root of the results.
        deadline_s: cases that would start later than this are skipped and reported.
        say: receives a line a form.

    Returns:
        What went wrong, one line each; the record keeps nothing of those.
    """
    device = torch.device("cpu")
    start = time.monotonic()
    ceilings = measure_device(device, [])
    info = make_run_info(SUITE, device, ceilings.copy_tbs, ceilings.gemm_tflops["fp32"])
    path = result_path(out, info)
    save_records(path, info, [])  # fails here, not after an hour, where out cannot be written
    faults = []
    for case in cases:
        if deadline_s is not None and time.monotonic() - start > deadline_s:
            faults.append(f"{case.name}: skipped, the deadline of {deadline_s:g} s passed")
            continue
        source = build_source(Problem(case.name, "fp32", 1, case.config))
        timm_nodes = plain_node_count(source, case)
        for form in case.forms:
            try:
                records = _export(source, case, form, batches, timm_nodes, info)
            except ParityError as error:
                faults.append(f"{case.name} {form}: {error}")
                say(faults[-1])
                continue
            save_records(path, info, records)
            say(_line(records))
        del source
        gc.collect()
    return faults


def plain_node_count(source: Source, case: Case) -> int | None:
    """Nodes that PyTorch's exporter makes of the framework's model; None where that fails."""
    config = case.config or VARIANTS[case.name]
    images = torch.zeros(1, config.in_channels, *config.image_size)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                source.model, (images,), dynamo=True, optimize=True, verbose=False
            )
    except torch.onnx.OnnxExporterError:
        return None
    assert program is not None
    return sum(1 for _ in program.model.graph)


def _export(
    source: Source, case: Case, form: str, batches: Sequence[int], timm_nodes: int | None,
    info: RunInfo,
) -> list[Record]:  # fmt: skip
    """One record a batch."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        report = export_onnx(
            source.engine_source, Path(folder) / "model.onnx", check_batches=batches, **FORMS[form]
        )
        seconds = time.monotonic() - started
    assert report.parity is not None
    found = []
    for batch in sorted({row.batch for row in report.parity.rows}):
        rows = [row for row in report.parity.rows if row.batch == batch]
        record = _common(report, timm_nodes) | {
            "case": case.name,
            "dtype": "fp32",
            "batch": batch,
            "variant": f"{report.attention}-opset{report.opset}",
            "max_abs_err": max(row.max_abs_diff for row in rows if row.folded),
            "max_abs_err_unfolded": max(row.max_abs_diff for row in rows if not row.folded),
            "top1": min(row.top1_agreement or 0.0 for row in rows),
            "check_s": seconds - report.export_seconds,
            "framework": source.framework,
        }
        found.append(stamp(info, record))
    return found


def _common(report: ExportReport, timm_nodes: int | None) -> Record:
    assert report.parity is not None
    return {
        "opset": report.opset,
        "attention": report.attention,
        "nodes": report.node_count,
        "plain_nodes": timm_nodes,
        "file_bytes": report.file_bytes,
        "export_s": report.export_seconds,
        "bound": report.parity.bound,
        "max_abs_logit": report.parity.max_abs_output,
    }


def _line(records: Sequence[Record]) -> str:
    first = records[0]
    errors = ", ".join(f"b{r['batch']} {r['max_abs_err']:.1e}" for r in records)
    return (
        f"{first['case']} {first['variant']}: {first['nodes']} nodes (plain export "
        f"{first['plain_nodes']}), {first['file_bytes'] / 2**20:.0f} MiB, export "
        f"{first['export_s']:.0f} s, check {first['check_s']:.0f} s, {errors}"
    )


def _tokens(config: SwinConfig) -> int:
    """Tokens times channels squared, which orders models by their products' size."""
    rows, cols = config.map_size(0, config.image_size)
    return rows * cols * config.embed_dim**2 * sum(config.depths)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m fastswin.bench.export_sweep", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--models", default=",".join(list_models()), help="names, by commas")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--out", type=Path, default=DEFAULT_ROOT, help="root of the records")
    parser.add_argument("--deadline-s", type=float, help="start no model after this many seconds")
    options = parser.parse_args(arguments)
    try:
        names = parse_names(options.models, list_models(), "--models")
        batches = parse_batches(options.batches, "--batches")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    faults = run_sweep(
        default_cases(names), batches=batches, out=options.out, deadline_s=options.deadline_s,
        say=lambda line: print(line, flush=True),
    )  # fmt: skip
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
