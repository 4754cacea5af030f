"""``python -m fastswin.bench.op_library_linear``: the CUDA library's GEMMs with its own epilogues.

    1. every combination of formats and epilogues on one shape: which exist, which are refused
    2. every GEMM of Swin-L, B and T at batches 32 and 1: each algorithm of the library's list, and
       what PyTorch offers (linear, addmm in place, _scaled_mm) beside it

Each algorithm is checked first, three runs bitwise on poisoned outputs and against fp32, then timed
by replays of a CUDA graph with warm caches. A refused combination is printed with the library's
status and the run goes on. One JSON line per result is written as it is known.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from fastswin.bench.failures import describe as describe_failure
from fastswin.bench.op_library_linear_problems import (
    BATCHES,
    MODELS,
    PROBE,
    RMS_BOUNDS,
    VARIANTS_OF,
    Inputs,
    Layer,
    Variant,
    layers,
    probe_variants,
)
from fastswin.bench.op_library_linear_results import Result, summary
from fastswin.engine.library_workspace import library_workspace_in_pool
from fastswin.ops import library_linear
from fastswin.ops.library_linear.library import (
    LibraryLinearError,
    library_blocker,
    library_version,
)
from fastswin.ops.library_linear.problem import FP8

#: Replays per timing; the median counts.
REPLAYS = 3

#: Calls captured per graph: about this much time, within bounds.
GRAPH_US, MIN_CALLS, MAX_CALLS = 800.0, 8, 64

#: For the number of calls only: what a GEMM reaches at best, and a launch costs at least.
RATE_FLOPS, LAUNCH_US = 7e14, 2.5

#: Largest error of one element over the allowed RMS error.
PEAK_OVER_RMS = 16.0


def examine(inputs: Inputs, variant: Variant) -> Result:
    """Check and time every algorithm of a variant, and PyTorch's way."""
    result = Result(inputs.layer, variant)
    expected = inputs.expected(variant)
    step = expected.abs().max().item() / 448 if variant.out_dtype == FP8 else 1.0
    call = _Call(inputs, variant, step)
    try:
        plan = call.plan()
    except LibraryLinearError as error:
        result.error = describe_failure(error).message
        plan = None
    for index in range(len(plan.algorithms) if plan is not None else 0):
        assert plan is not None
        result.told.append(plan.describe(index))
        try:
            call.check(expected, index)
            result.latency_us.append(_time_us(lambda i=index: call(i), inputs.layer))  # type: ignore[misc]
        except (RuntimeError, ArithmeticError) as error:
            torch.cuda.synchronize()  # raises where the device itself has failed: the end
            result.latency_us.append(None)
            result.notes[index] = describe_failure(error).message
    for name, contender in inputs.contenders(variant).items():
        result.contender = name
        try:
            result.contender_us = _time_us(contender, inputs.layer)
        except (RuntimeError, ValueError) as error:
            result.notes[-1] = f"{name}: {describe_failure(error).message}"
    return result


class _Call:
    """One variant on its tensors; the residual is updated in place."""

    def __init__(self, inputs: Inputs, variant: Variant, step: float) -> None:
        self.inputs, self.variant, self.step = inputs, variant, step
        self.arguments = inputs.arguments(variant, step)
        shape = (inputs.layer.M, inputs.layer.N)
        self.out = torch.zeros(shape, dtype=variant.out_dtype, device=inputs.x.device)
        if variant.residual:
            self.arguments["residual"] = self.out

    def __call__(self, algorithm: int) -> torch.Tensor:
        return library_linear(**self.arguments, out=self.out, impl="library", config=algorithm)

    def plan(self) -> Any:
        """The plan behind the calls."""
        from fastswin.ops.library_linear.launch import describe, plan_for

        given = self.arguments
        problem, pointers = describe(
            given["x"], given["weight"], given["bias"], given.get("scale"),
            given.get("row_scale"), self.variant.gelu, given.get("residual"),
            given.get("output_inverse"), self.out,
        )  # fmt: skip
        return plan_for(problem, torch.cuda.current_device(), pointers)

    def check(self, expected: torch.Tensor, algorithm: int) -> None:
        """Three runs, bitwise equal and right.

        Raises:
            ArithmeticError: they differ or are wrong.
        """
        runs = []
        for _ in range(3):
            if self.variant.residual:
                self.out.copy_(self.inputs.stream)
            else:
                self.out.view(torch.uint8).fill_(0xFF)  # NaN in every format
            runs.append(self(algorithm).clone())
        if not all(torch.equal(_bits(runs[0]), _bits(other)) for other in runs[1:]):
            raise ArithmeticError("runs differ")
        bound = RMS_BOUNDS[self.variant.dtype, self.variant.out_dtype]
        wrong = (runs[0].float() * self.step - expected).abs()
        rms = expected.square().mean().sqrt().item()
        found, peak = wrong.square().mean().sqrt().item() / rms, wrong.max().item() / rms
        if not (found <= bound and peak <= PEAK_OVER_RMS * bound):
            raise ArithmeticError(f"wrong: rms {found:.2e} above {bound:.0e}, or peak {peak:.2e}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _time_us(call: Callable[[], object], layer: Layer) -> float:
    """Microseconds a call, from replays of a graph of several."""
    expected_us = max(LAUNCH_US, 2e6 * layer.M * layer.N * layer.K / RATE_FLOPS)
    calls = int(min(MAX_CALLS, max(MIN_CALLS, GRAPH_US / expected_us)))
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with library_workspace_in_pool(), torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[REPLAYS // 2]


def run(
    device: torch.device,
    out: Path,
    models: Sequence[str],
    batches: Sequence[int],
    deadline_s: float,
    say: Callable[[str], None] = print,
) -> list[Result]:
    """Probe, then every layer; prints a table and writes ``library_linear.jsonl``.

    Args:
        device: a GPU.
        out: folder of the log.
        models: keys of :data:`MODELS`.
        batches: images.
        deadline_s: no new layer is begun after this.
        say: prints one line.
    """
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    version = ".".join(map(str, library_version()))
    say(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, cublasLt {version}")
    results: list[Result] = []
    with (out / "library_linear.jsonl").open("w") as log, torch.cuda.device(device):
        _write(log, {"gpu": torch.cuda.get_device_name(device), "cublaslt": version,
                     "torch": torch.__version__})  # fmt: skip
        work: list[tuple[Layer, Iterable[Variant]]] = [(PROBE, probe_variants())]
        work += [(layer, VARIANTS_OF[layer.kind]) for layer in layers(list(models), list(batches))]
        for layer, variants in work:
            if time.monotonic() - start > deadline_s:
                say(f"{layer.case} {layer.kind}: skipped, the deadline is over")
                _write(log, {"case": layer.case, "kind": layer.kind, "error": "deadline"})
                continue
            inputs = Inputs.make(layer, device)
            for variant in variants:
                results.append(examine(inputs, variant))
                say(results[-1].line())
                _write(log, results[-1].record())
    for text in summary(results):
        say(text)
    say(f"{len(results)} variants in {time.monotonic() - start:.1f} s")
    return results


def _write(log: TextIO, record: dict[str, Any]) -> None:
    log.write(json.dumps(record) + "\n")
    log.flush()  # what is known stays known if the process dies


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0 all right, 1 something wrong, 2 cannot run."""
    parser = argparse.ArgumentParser(prog="fastswin.bench.op_library_linear")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the log")
    parser.add_argument("--deadline-s", type=float, default=60.0)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated, of L, B, T")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    options = parser.parse_args(arguments)
    models = [m for m in options.models.split(",") if m]
    if unknown := set(models) - set(MODELS):
        parser.error(f"--models must be of {', '.join(MODELS)}, got {', '.join(sorted(unknown))}")
    reason = library_blocker() or (None if torch.cuda.is_available() else "there is no GPU")
    if reason:
        print(f"cannot run: {reason}")
        return 2
    batches = [int(b) for b in options.batches.split(",") if b]
    results = run(torch.device("cuda", 0), options.out, models, batches, options.deadline_s)
    return int(any("wrong" in n or "differ" in n for r in results for n in r.notes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
