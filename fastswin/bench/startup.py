"""Suite ``startup``: seconds from starting Python to the first logits, cold and warm.

Every start is a process of its own. Cold: empty cache folders for Triton and torch.compile. Warm:
the folders that the cold start filled; the median of several. Interpreter, imports, loading a
checkpoint, compiling, capturing and the first answer all count, and the answer is checked. The
operating system's file cache is warm in both. Installers leave Python's bytecode beside torch's
sources; where it is missing and cannot be written (a read-only installation compiles 3 s of it in
every process) it goes to a cache folder as well, for every variant.

    python -m fastswin.bench.startup --models NAME,NAME --batches 1 --dtypes fp16
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fastswin.bench.correctness import Gate, judge, make_gate
from fastswin.bench.problems import (
    PRECISIONS,
    Problem,
    make_problems,
    parse_batches,
    parse_names,
)
from fastswin.bench.record import (
    DEFAULT_ROOT,
    Record,
    make_run_info,
    result_path,
    round_significant,
    save_records,
    stamp,
)
from fastswin.bench.source import build_source
from fastswin.bench.startup_tables import PARTS
from fastswin.bench.suites import choose_device, clock_precision, measure_device
from fastswin.models import list_models

VARIANTS = ("fastswin", "compile", "compile-reduce-overhead", "eager")

#: Models measured unless others are named.
MODELS = ("swin_tiny_patch4_window7_224", "swin_base_patch4_window7_224")

WARM_STARTS = 3

#: Longest that one start may take, in s.
TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class StartupResult:
    """Records of a run and what went wrong, one line each."""

    records: tuple[Record, ...]
    path: Path
    problems_found: tuple[str, ...]


def run_startup(
    problems: Sequence[Problem],
    variants: Sequence[str] | None = None,
    *,
    device: str | None = None,
    out: Path = DEFAULT_ROOT,
    warm_starts: int = WARM_STARTS,
    deadline_s: float = 480.0,
    progress: Callable[[str], None] = lambda line: None,
) -> StartupResult:
    """Measure starts and store them.

    Args:
        problems: models, precisions and batches.
        variants: of :data:`VARIANTS`; None takes fastswin and compile-reduce-overhead on a GPU,
            fastswin and eager on a CPU.
        device: "cuda" or "cpu"; None takes the GPU where there is one.
        out: root folder of the records.
        warm_starts: starts after the cold one, at least 1.
        deadline_s: no problem is begun after this.
        progress: receives a line per start.

    Raises:
        ValueError: an unknown variant, or ``warm_starts`` below 1.
    """
    target, _ = choose_device(device)
    if variants is None:
        other = "compile-reduce-overhead" if target.type == "cuda" else "eager"
        variants = ("fastswin", other)
    for variant in variants:
        if variant not in VARIANTS:
            raise ValueError(f"variants must be among {', '.join(VARIANTS)}, got {variant!r}")
    if warm_starts < 1:
        raise ValueError(f"warm_starts must be at least 1, got {warm_starts}")
    start = time.monotonic()
    ceilings = measure_device(target, problems)
    gemm = ceilings.gemm_tflops[clock_precision(target)]
    info = make_run_info("startup", target, ceilings.copy_tbs, gemm)
    path = result_path(Path(out), info)
    records: list[Record] = []
    wrong: list[str] = []
    for problem in problems:
        with tempfile.TemporaryDirectory(prefix="fastswin-startup-") as scratch:
            gate: Gate | None = None
            for variant in variants:
                name = f"{problem} {variant}"
                if time.monotonic() - start > deadline_s:
                    wrong.append(f"{name}: the deadline of {deadline_s:g} s is over")
                    continue
                gate = gate or _write_inputs(problem, target, Path(scratch))
                try:
                    found = _measure(problem, variant, target, Path(scratch), gate, warm_starts)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    wrong.append(f"{name}: {error}")
                    continue
                for record in found:
                    progress(_line(record))
                records += [stamp(info, record) for record in found]
                save_records(path, info, records)  # the next start may be one too many
    return StartupResult(tuple(records), path, tuple(wrong))


def _write_inputs(problem: Problem, device: torch.device, folder: Path) -> Gate:
    """Weights and images of all starts, and what is right for them."""
    from safetensors.torch import save_file

    source = build_source(problem)
    weights = {k: v.contiguous().clone() for k, v in source.engine_source.state_dict().items()}
    save_file(weights, folder / "weights.safetensors")
    gate = make_gate(source, problem, device)
    images = gate.images[: problem.batch]
    save_file({"images": images.cpu().contiguous()}, folder / "images.safetensors")
    return dataclasses.replace(gate, images=images, reference=gate.reference[: problem.batch].cpu())


def _measure(
    problem: Problem,
    variant: str,
    device: torch.device,
    folder: Path,
    gate: Gate,
    warm_starts: int,
) -> list[Record]:
    with tempfile.TemporaryDirectory(prefix="fastswin-cache-") as cache:
        starts = [
            _start(problem, variant, device, folder, Path(cache), gate)
            for _ in range(1 + warm_starts)
        ]
    return [
        _record(problem, variant, "cold", starts[:1]),
        _record(problem, variant, "warm", starts[1:]),
    ]


def _start(
    problem: Problem,
    variant: str,
    device: torch.device,
    folder: Path,
    cache: Path,
    gate: Gate,
) -> dict[str, float]:
    """One process; its parts in seconds and its error.

    Raises:
        RuntimeError: it failed, or its logits are wrong.
        subprocess.TimeoutExpired: it took longer than :data:`TIMEOUT_S`.
    """
    from safetensors.torch import load_file

    environment = make_environment(cache)
    job: dict[str, Any] = {
        "variant": variant, "folder": str(folder), "device": str(device), "model": problem.model,
        "dtype": problem.dtype, "batch": problem.batch, "own_config": problem.config is not None,
        "config": dataclasses.asdict(problem.swin_config), "started": time.time(),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "fastswin.bench.startup_child", json.dumps(job)],
        env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
    parts: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    verdict = judge(load_file(folder / "logits.safetensors")["logits"], gate)
    if verdict.failure is not None:
        raise RuntimeError(f"wrong logits: {verdict.failure}")
    return parts | {"max_abs_err": verdict.max_abs_err}


def make_environment(cache: Path) -> dict[str, str]:
    """Variables of a start: this checkout, and every cache in a folder of ours."""
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }
    if not bytecode_installed():
        environment["PYTHONPYCACHEPREFIX"] = str(cache / "bytecode")
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def bytecode_installed() -> bool:
    """Whether torch's installation holds its compiled bytecode, as installers leave it."""
    return Path(importlib.util.cache_from_source(torch.__file__)).exists()


def _record(
    problem: Problem, variant: str, cache: str, starts: Sequence[dict[str, float]]
) -> Record:
    medians = {key: statistics.median(start[key] for start in starts) for key in starts[0]}
    total_s = medians.pop("total_s")
    return {
        "case": f"{problem.model}, {cache} cache",
        "dtype": problem.dtype,
        "batch": problem.batch,
        "variant": variant,
        "median_ms": total_s * 1e3,
        "count": len(starts),
        "cpu_cores": os.cpu_count(),
        "bytecode": "installed" if bytecode_installed() else "cached",
        **{key: round_significant(value) for key, value in medians.items()},
    }


def _line(record: Record) -> str:
    seconds = ", ".join(f"{part} {record[f'{part}_s']:.2f}" for part in PARTS)
    return f"{record['case']} {record['variant']}: {record['median_ms'] / 1e3:.2f} s ({seconds})"


def startup_problems(
    models: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    batches: Sequence[int] | None,
    device: str | None,
) -> list[Problem]:
    """Every combination; by default two models at batch 1 in the device's usual precision."""
    default = "fp16" if choose_device(device)[0].type == "cuda" else "fp32"
    return make_problems("model", models or MODELS, dtypes or [default], batches or [1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite from the command line; exit code 1 where a start failed."""
    parser = argparse.ArgumentParser(prog="python -m fastswin.bench.startup")
    parser.add_argument("--models", help=f"default: {','.join(MODELS)}")
    parser.add_argument("--dtypes", help="default: fp16 (CPU: fp32)")
    parser.add_argument("--batches", help="default: 1")
    parser.add_argument("--variants", help=f"of {','.join(VARIANTS)}")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--deadline-s", type=float, default=480.0)
    options = parser.parse_args(arguments)
    problems = startup_problems(
        options.models and parse_names(options.models, list_models(), "models"),
        options.dtypes and parse_names(options.dtypes, list(PRECISIONS), "dtypes"),
        options.batches and parse_batches(options.batches),
        options.device,
    )
    result = run_startup(
        problems,
        options.variants and parse_names(options.variants, VARIANTS, "variants"),
        device=options.device,
        out=options.out,
        deadline_s=options.deadline_s,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(json.dumps(list(result.records), indent=1))
    for line in result.problems_found:
        print(f"not measured: {line}", file=sys.stderr)
    return 1 if result.problems_found else 0


if __name__ == "__main__":
    raise SystemExit(main())
