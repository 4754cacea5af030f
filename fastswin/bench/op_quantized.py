"""``python -m fastswin.bench.op_quantized``: the 8-bit GEMMs of Swin on a card, tile by tile.

    1. every candidate of the tile space is compiled, by several processes, into Triton's cache
    2. every layer of Swin-L, B and T at batches 32 and 1, in int8 and fp8: each candidate is run
       three times on poisoned outputs (bitwise equal, and right), then timed by CUDA graphs
    3. LayerNorm, merging and attention with 8-bit results beside their fp16 forms

One line per layer and format; one JSON line each in ``op_quantized.jsonl`` as it is known.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from fastswin.bench.failures import describe as describe_failure
from fastswin.bench.op_library_linear_problems import BATCHES, MODELS, Layer
from fastswin.bench.op_quantized_others import STAGES, other_calls
from fastswin.bench.op_quantized_problems import (
    FORMATS,
    RESIDUAL,
    Operands,
    candidates,
    default_config,
    describe,
    quantized_layers,
)
from fastswin.bench.timing import CudaClock
from fastswin.ops.quantized_linear.config import QuantizedGemmConfig

META = torch.device("meta")

#: Replays per timing; the median counts.
REPLAYS = 3

#: Calls captured per graph: about this much time, within bounds.
GRAPH_US, MIN_CALLS, MAX_CALLS = 600.0, 6, 48

#: For the number of calls only: what an 8-bit GEMM reaches at best, and a launch costs at least.
RATE_OPS, LAUNCH_US = 9e14, 2.5

#: Part of the deadline after which compilation is not waited for.
COMPILING_SHARE = 0.5

#: Configurations named on a line.
BEST = 3

#: A guess for the number of calls in a graph, µs.
OTHERS_US = 15.0

#: A GEMM, or one call of a stage by name.
Job = tuple[Layer, str, QuantizedGemmConfig] | tuple[str, str]


def time_us(call: Callable[[], object], clock: CudaClock, expected_us: float) -> float:
    """Microseconds a call, the median of replays of a graph of several."""
    calls = int(min(MAX_CALLS, max(MIN_CALLS, GRAPH_US / max(expected_us, LAUNCH_US))))
    call()
    graph = clock.capture(call, calls)
    graph()
    times = sorted(clock.elapsed_ms(graph, 1) * 1e3 / calls for _ in range(REPLAYS))
    return times[REPLAYS // 2]


def compile_job(job: Job) -> str:
    """Compile one candidate in this process; why it cannot be, or nothing."""
    from fastswin.testing.aot import record_launches

    try:
        with record_launches() as launches:
            if len(job) == 2:
                other_calls(job[0], list(FORMATS), META)[job[1]]()
            else:
                Operands.make(job[0], job[1], META).call(job[2])
        for launch in launches:
            launch.kernel.warmup(**launch.arguments, **launch.options, grid=(1,))
    except Exception as error:
        return f"{_name(job)}: {describe_failure(error).message}"
    return ""


def _name(job: Job) -> str:
    if len(job) == 2:
        return f"{job[0]} {job[1]}"
    return f"{job[0].case} {job[0].kind} {job[1]} {describe(job[2])}"


def binaries(work: Sequence[tuple[Layer, str]]) -> list[Job]:
    """Jobs with different kernels, in the order of the work."""
    found: dict[tuple[object, ...], Job] = {}
    for layer, format in work:
        for config in candidates(layer, format):
            third = layer.kind == "qkv" and layer.N // 3 % config.block_n == 0
            kind = "residual" if layer.kind in RESIDUAL else layer.kind
            found.setdefault((kind, third, format, config), (layer, format, config))
    return list(found.values())


def compile_all(jobs: Sequence[Job], workers: int, limit_s: float) -> list[str]:
    """Compile side by side until the limit; returns what does not compile."""
    os.environ["OMP_NUM_THREADS"] = "1"  # every process would wake a thread per core
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)
    waiting = {pool.submit(compile_job, job): job for job in jobs}
    done, late = concurrent.futures.wait(waiting, timeout=limit_s)
    pool.shutdown(wait=False, cancel_futures=True)
    wrong = [why for future in done if (why := future.result())]
    return [*wrong, f"{len(late)} not compiled in time"] if late else wrong


def examine(
    layer: Layer, format: str, device: torch.device, clock: CudaClock, deadline: float
) -> dict[str, Any]:
    """Check and time every candidate of a layer, and the contenders."""
    operands = Operands.make(layer, format, device)
    expected = operands.expected()
    best_us = 2e6 * layer.M * layer.N * layer.K / RATE_OPS
    record: dict[str, Any] = {
        "case": layer.case, "kind": layer.kind, "format": format,
        "M": layer.M, "N": layer.N, "K": layer.K,
        "default": describe(default_config(layer, format)),
        "latency_us": {}, "contenders_us": {}, "notes": {},
    }  # fmt: skip
    for config in candidates(layer, format):
        name = describe(config)
        if time.monotonic() > deadline:
            record["notes"][name] = "deadline"
            continue
        try:
            wrong = check(operands, config, expected)
            if wrong:
                record["notes"][name] = f"WRONG: {wrong}"
                continue
            record["latency_us"][name] = time_us(lambda c=config: operands.call(c), clock, best_us)  # type: ignore[misc]
        except Exception as error:
            torch.cuda.synchronize()  # raises where the device itself has failed: the end
            record["notes"][name] = describe_failure(error).message
    del expected
    for name, call in operands.contenders().items():
        try:
            record["contenders_us"][name] = time_us(call, clock, best_us)
        except Exception as error:
            record["notes"][name] = describe_failure(error).message
    return record


def check(operands: Operands, config: QuantizedGemmConfig, expected: torch.Tensor) -> str:
    """Three runs, bitwise equal and right; why not, or nothing."""
    first = None
    for _ in range(3):
        operands.reset()
        found = operands.call(config).view(torch.uint8)
        if first is None:
            first = found.clone()
            if wrong := operands.wrong(expected):
                return wrong
        elif not torch.equal(first, found):
            return "runs differ"
    return ""


def examine_others(
    stage: str, formats: Sequence[str], device: torch.device, clock: CudaClock, deadline: float
) -> dict[str, Any]:
    """Times of what stands between the GEMMs of a stage."""
    found: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name, call in other_calls(stage, formats, device).items():
        if time.monotonic() > deadline:
            break
        try:
            found[name] = time_us(call, clock, OTHERS_US)
        except Exception as error:
            torch.cuda.synchronize()  # raises where the device itself has failed: the end
            notes[name] = describe_failure(error).message
    text = ", ".join(f"{name} {us:.2f}" for name, us in found.items())
    text += "".join(f", {name}: {why}" for name, why in notes.items())
    return {"case": stage, "kind": "others", "latency_us": found, "notes": notes,
            "line": f"{stage} us: {text}"}  # fmt: skip


def line(record: dict[str, Any]) -> str:
    """One line of the table."""
    head = f"{record['case']:7s} {record['kind']:5s} {record['format']:4s}"
    ranked = sorted((us, name) for name, us in record["latency_us"].items())
    if not ranked:
        return f"{head} nothing ran: {record['notes']}"
    shown = ranked[:BEST]
    rate = 2e-6 * record["M"] * record["N"] * record["K"] / ranked[0][0]
    text = f"{head} {ranked[0][0]:7.2f} us {rate:5.0f} T/s"
    if (default := record["latency_us"].get(record["default"])) is not None:
        text += f"  default {default:7.2f}"
    for name, us in record["contenders_us"].items():
        text += f"  {name} {us:7.2f} = {us / ranked[0][0]:4.2f}x"
    text += "  | " + ", ".join(f"{name} {us:.2f}" for us, name in shown)
    bad = {n: w for n, w in record["notes"].items() if w != "deadline"}
    return text + (f"  [{len(bad)} out: {next(iter(bad.items()))}]" if bad else "")


def run(
    device: torch.device,
    out: Path,
    models: Sequence[str],
    batches: Sequence[int],
    formats: Sequence[str],
    workers: int,
    deadline_s: float,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Compile, check, time; prints a table and writes ``op_quantized.jsonl``.

    Args:
        device: a GPU.
        out: folder of the log.
        models: keys of :data:`MODELS`.
        batches: images.
        formats: of "int8", "fp8".
        workers: compiling processes.
        deadline_s: nothing new is begun after this.
        say: prints one line.
    """
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    work = [(la, f) for la in quantized_layers(list(models), list(batches)) for f in formats]
    say(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {len(work)} layers")
    jobs: list[Job] = [*binaries(work)]
    jobs += [(stage, name) for stage in STAGES for name in other_calls(stage, formats, META)]
    for wrong in compile_all(jobs, workers, deadline_s * COMPILING_SHARE):
        say(f"compile: {wrong}")
    say(f"{len(jobs)} kernels compiled in {time.monotonic() - start:.0f} s")
    deadline = start + deadline_s
    clock = CudaClock()
    records: list[dict[str, Any]] = []
    with (out / "op_quantized.jsonl").open("w") as log, torch.cuda.device(device):
        _write(log, {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__})
        for stage in STAGES:
            record = examine_others(stage, formats, device, clock, deadline)
            say(record["line"])
            _write(log, record)
        skipped = 0
        for layer, format in work:
            if time.monotonic() > deadline:
                skipped += 1
                continue
            records.append(examine(layer, format, device, clock, deadline))
            say(line(records[-1]))
            _write(log, records[-1])
    say(f"{len(records)} layers in {time.monotonic() - start:.0f} s, {skipped} past the deadline")
    return records


def _write(log: TextIO, record: dict[str, Any]) -> None:
    log.write(json.dumps(record) + "\n")
    log.flush()  # what is known stays known if the process dies


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0 all right, 1 something wrong, 2 cannot run."""
    parser = argparse.ArgumentParser(prog="fastswin.bench.op_quantized")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the log")
    parser.add_argument("--deadline-s", type=float, default=140.0)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated, of L, B, T")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--formats", default=",".join(FORMATS), help="of int8, fp8")
    parser.add_argument("--workers", type=int, default=max(1, min(16, os.cpu_count() or 1)))
    options = parser.parse_args(arguments)
    models = [m for m in options.models.split(",") if m]
    formats = [f for f in options.formats.split(",") if f]
    for name, chosen, legal in (("models", models, MODELS), ("formats", formats, FORMATS)):
        if unknown := set(chosen) - set(legal):
            parser.error(f"--{name} must be of {', '.join(legal)}, got {', '.join(unknown)}")
    if not torch.cuda.is_available():
        print("cannot run: there is no GPU")
        return 2
    batches = [int(b) for b in options.batches.split(",") if b]
    with contextlib.suppress(KeyboardInterrupt):
        records = run(
            torch.device("cuda", 0), options.out, models, batches, formats, options.workers,
            options.deadline_s,
        )  # fmt: skip
        return int(any("WRONG" in w or "differ" in w for r in records for w in r["notes"].values()))
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
