"""Where the time of one forward goes: every call with its time, work and share of the roofline.

    record the calls of a forward -> time each kind -> rows; their sum beside the engine's own time

On a GPU the times are those of the kernels, as the driver's tracer (CUPTI, through torch.profiler)
reports them; where that fails, and on a CPU, each call is run in a loop (a CUDA graph of it) and
timed by events, which leaves its data in the cache. The engine's own time is measured as users see
it, graphs included, so ``sum - measured`` tells what overlaps and ``measured - sum`` what waits.

    python -m fastswin.bench.profile --model NAME --batch 32 --precision fp16 --json
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch

from fastswin.bench.call_cost import call_bytes, call_flops
from fastswin.bench.captured import captured_candidate
from fastswin.bench.failures import describe
from fastswin.bench.problems import Problem, seeded_images
from fastswin.bench.record import device_name
from fastswin.bench.roofline import Ceilings, measure_ceilings
from fastswin.bench.source import perturb_weights
from fastswin.bench.suites import choose_device
from fastswin.bench.timing import Candidate, Timing, make_clock, measure
from fastswin.bench.trace import trace_calls
from fastswin.engine import Engine
from fastswin.engine.calls import Call
from fastswin.models import SwinTransformer, find_variant

#: Discarded calls of each kind; the forward pass itself has run before.
WARMUP_CALLS = 10

#: Calls in the graph that a loop replays on a GPU: the host takes longer than most of them.
LOOP_CALLS = 20

Method = Literal["auto", "trace", "loop"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of call: same stage, layer, function and shapes.

    Attributes:
        stage: index; None for embedding, pool and head.
        layer, function: what it computes and by what; ``ops.`` marks an operator of fastswin.
        kernels: names of its kernels, where the trace told them.
        calls: how many a forward makes.
        latency_us: of one call.
        total_us: of all.
        flops, bytes: of one call.
        roofline_us: the least one call can take at the measured ceilings.
        roofline_percent: that over the latency.
        share_percent: of the sum of all rows.
    """

    stage: int | None
    layer: str
    function: str
    kernels: tuple[str, ...]
    calls: int
    latency_us: float
    total_us: float
    flops: int
    bytes: int
    roofline_us: float
    roofline_percent: float
    share_percent: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """A forward pass, call by call.

    Attributes:
        model, precision, batch, device: what was run and where.
        method: "trace" or "loop"; ``note`` says why a trace was not possible.
        copy_tbs, gemm_tflops: the ceilings of this run.
        rows: in the order of the forward pass.
        sum_ms: of the rows.
        measured_ms: median of the engine's calls.
        graph: whether those replay CUDA graphs.
    """

    model: str
    precision: str
    batch: int
    device: str
    method: str
    note: str
    copy_tbs: float
    gemm_tflops: float
    rows: tuple[Row, ...]
    sum_ms: float
    measured_ms: float
    graph: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


def profile_model(
    model: str | torch.nn.Module,
    precision: str,
    batch: int,
    *,
    device: str | torch.device | None = None,
    method: Method = "auto",
    seconds: float = 0.05,
    ceilings: Ceilings | None = None,
    name: str | None = None,
    **engine_options: Any,
) -> Profile:
    """Profile one forward of the engine.

    Args:
        model: a named variant (seeded weights; speed does not depend on them) or a live model.
        precision: of the engine.
        batch: images, at least 1.
        device: "cuda" or "cpu"; None takes the GPU where there is one.
        method: "trace" asks the driver, "loop" times calls by events; "auto" tries in this order.
        seconds: time for each kind of call in a loop, and for the engine.
        ceilings: copy and GEMM rates; None measures them.
        name: of a live model, for the report.
        **engine_options: further arguments of ``Engine``, such as ``tuning=``.

    Raises:
        ValueError: an unknown model, precision or method, or a batch below 1.
        RuntimeError: ``method="trace"`` and there is no trace; the message says why.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {get_args(Method)}, got {method!r}")
    target, _ = choose_device(device)
    if isinstance(model, str):
        name = name or model
        source = SwinTransformer(find_variant(model)).eval()
        perturb_weights(source)
        model = source
    if target.type == "cpu":  # another runtime's calls are its own
        engine_options.setdefault("backend", "torch")
    engine = Engine(model, precision, device=target, **engine_options)  # type: ignore[arg-type]
    name = name or type(model).__name__
    problem = Problem(name, precision, batch, config=engine.config)
    images = seeded_images(problem, batch, engine.device, seed=0)
    if ceilings is None:
        ceilings = measure_ceilings(engine.device, [precision])
    measured_ms = _engine_ms(engine, images, seconds)
    calls = engine.calls(images)
    with engine.own_numerics():
        times_us, kernels, used, note = _time(calls, engine.device, method, seconds)
    rows = _rows(calls, times_us, kernels, precision, ceilings)
    return Profile(
        model=name, precision=precision, batch=batch, device=device_name(engine.device),
        method=used, note=note, copy_tbs=ceilings.copy_tbs,
        gemm_tflops=ceilings.gemm_tflops[precision], rows=rows,
        sum_ms=sum(row.total_us for row in rows) / 1e3, measured_ms=measured_ms,
        graph=engine.device.type == "cuda" and engine_options.get("cuda_graphs", True),
    )  # fmt: skip


def _engine_ms(engine: Engine, images: torch.Tensor, seconds: float) -> float:
    candidate = Candidate("engine", lambda: engine(images))
    result = measure([candidate], make_clock(engine.device), seconds=seconds)["engine"]
    if not isinstance(result, Timing):
        raise RuntimeError(result.message)
    return result.median_ms


def _time(
    calls: Sequence[Call], device: torch.device, method: Method, seconds: float
) -> tuple[list[float], list[tuple[str, ...]], str, str]:
    """Microseconds and kernel names of each call, the method used and why not the other."""
    note = ""
    if method == "trace" or (method == "auto" and device.type == "cuda"):
        try:
            traced = trace_calls(calls, device)
            return [t.latency_us for t in traced], [t.kernels for t in traced], "trace", ""
        except Exception as error:  # the tracer may be taken, forbidden or absent
            note = describe(error).message
            if method == "trace":
                raise RuntimeError(f"no trace: {note}") from error
    captured = LOOP_CALLS if device.type == "cuda" else 0
    candidates = []
    for index, call in enumerate(calls):
        candidate = captured_candidate(str(index), functools.partial(_runs, call), captured)
        candidates.append(dataclasses.replace(candidate, peak_mib=0.0))
    results = measure(candidates, make_clock(device), seconds=seconds, warmup=WARMUP_CALLS)
    times_us: list[float] = []
    for call, candidate in zip(calls, candidates, strict=True):
        result = results[candidate.name]
        if not isinstance(result, Timing):
            raise RuntimeError(f"{call.layer} ({call.name}): {result.message}")
        times_us.append(result.median_ms * 1e3 / max(captured, 1))
    return times_us, [()] * len(calls), "loop", note


def _runs(call: Call) -> Callable[[], object]:
    return call.run


def _rows(
    calls: Sequence[Call],
    times_us: Sequence[float],
    kernels: Sequence[tuple[str, ...]],
    precision: str,
    ceilings: Ceilings,
) -> tuple[Row, ...]:
    total = sum(call.count * us for call, us in zip(calls, times_us, strict=True))
    rows = []
    for call, us, names in zip(calls, times_us, kernels, strict=True):
        flops, size = call_flops(call), call_bytes(call)
        # TFLOP/s and TB/s are 1e6 of a unit per microsecond
        floor_us = max(flops / ceilings.gemm_tflops[precision], size / ceilings.copy_tbs) * 1e-6
        rows.append(
            Row(
                call.stage, call.layer, call.name, names, call.count, us, call.count * us, flops,
                size, floor_us, 100 * floor_us / us, 100 * call.count * us / total,
            )
        )  # fmt: skip
    return tuple(rows)


HEADER = (
    "stage", "layer", "function", "calls", "us", "total us", "MFLOP", "MB", "roofline %", "share %",
)  # fmt: skip


def table_rows(profile: Profile) -> list[tuple[str, ...]]:
    """Text cells of :data:`HEADER`, one row per kind of call."""
    return [
        (
            "-" if row.stage is None else str(row.stage), row.layer, row.function, str(row.calls),
            f"{row.latency_us:.2f}", f"{row.total_us:.1f}", f"{row.flops / 1e6:.0f}",
            f"{row.bytes / 1e6:.2f}", f"{row.roofline_percent:.0f}", f"{row.share_percent:.1f}",
        )
        for row in profile.rows
    ]  # fmt: skip


def summary(profile: Profile) -> str:
    """Sum and measured total, the method and the ceilings, in one line."""
    how = f"{profile.method} ({profile.note})" if profile.note else profile.method
    return (
        f"sum {profile.sum_ms:.4g} ms, measured {profile.measured_ms:.4g} ms "
        f"({'CUDA graph' if profile.graph else 'no graph'}); times by {how}; "
        f"copy {profile.copy_tbs:.3g} TB/s, GEMM {profile.gemm_tflops:.4g} TFLOP/s"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile from the command line, without any command-line package."""
    parser = argparse.ArgumentParser(prog="python -m fastswin.bench.profile")
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--device")
    parser.add_argument("--method", choices=get_args(Method), default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    profile = profile_model(
        options.model, options.precision, options.batch, device=options.device,
        method=options.method,
    )  # fmt: skip
    if options.json:
        json.dump(profile.to_dict(), sys.stdout, indent=1)
        print()
        return 0
    widths = [max(map(len, column)) for column in zip(HEADER, *table_rows(profile), strict=True)]
    for cells in (HEADER, *table_rows(profile)):
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
    print(summary(profile))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
