"""``python -m fastswin.bench.op_window_attention``: window attention against what people use.

Every problem is checked first (fp64 oracle: output, dqkv, dbias, all elements), then timed; a red
problem prints no speed. Contenders take qkv in image order and return image order: eager, eager
compiled, SDPA with bias and mask expanded to every window (compiled, too), FlexAttention compiled.
The roofline is the bytes of qkv, output and their gradients, each moved once, over the copy rate
of the same run.

    --backward   also times the backward alone and forward + backward ("step")
    --sweep      tries launch configurations of the backward instead and prints the best ones
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fastswin.bench.failures import Failure, describe, release_memory
from fastswin.bench.memory import held_mib, peak_mib
from fastswin.bench.op_window_attention_problems import (
    PROBLEMS,
    AttentionProblem,
    Function,
    Inputs,
)
from fastswin.bench.record import (
    DEFAULT_ROOT,
    Document,
    make_document,
    make_run_info,
    result_path,
    save_records,
    stamp,
)
from fastswin.bench.roofline import Ceilings, measure_ceilings
from fastswin.bench.timing import Candidate, Timing, make_clock, measure
from fastswin.testing.tolerance import compare_to_oracle

SUITE = "window_attention"
VARIANTS = ("fastswin", "eager", "compile", "sdpa", "sdpa-compile", "flex")

Call = Callable[[], object]
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class AttentionResult:
    """A finished run: its own records, the file they were merged into, what was not measured."""

    document: Document
    path: Path
    problems_found: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 where everything was right and in time, else 1."""
        return 1 if self.problems_found else 0


def _print_line(line: str) -> None:
    print(line, flush=True)


def check(problem: AttentionProblem, inputs: Inputs) -> tuple[dict[str, float], bool]:
    """Largest error of output, dqkv and dbias against fp64, and whether all passed their gates."""

    def run(function: Function, given: Inputs) -> list[torch.Tensor]:
        leaves = given.leaves()
        out = function(leaves)
        wanted = leaves.wanted[:2]  # dlogit_scale is a handful of sums: tests judge those
        return [out.detach(), *torch.autograd.grad(out, wanted, leaves.grad)]

    ours = run(problem.fastswin, inputs)
    oracle = run(problem.eager, inputs.to(torch.float64))
    eager = run(problem.eager, inputs)
    errors, passed = {}, True
    for name, a, e, o in zip(("out", "dqkv", "dbias"), ours, eager, oracle, strict=True):
        gate = compare_to_oracle(a, e, o, a.dtype)
        errors[name] = gate.max_error
        passed = passed and gate.passed
    return errors, passed


def _compiled(function: Function) -> Function:
    compiled = torch.compile(function, dynamic=False)

    def call(inputs: Inputs) -> torch.Tensor:
        # the backward is timed again and again on one graph
        with torch._functorch.config.patch(donated_buffer=False):
            return compiled(inputs)

    return call


def contenders(problem: AttentionProblem, names: Sequence[str]) -> dict[str, Function]:
    """Functions of the named variants."""
    made: dict[str, Callable[[], Function]] = {
        "fastswin": lambda: problem.fastswin,
        "eager": lambda: problem.eager,
        "compile": lambda: _compiled(problem.eager),
        "sdpa": lambda: problem.sdpa,
        "sdpa-compile": lambda: _compiled(problem.sdpa),
        "flex": lambda: _compiled(problem.flex),
    }
    return {name: made[name]() for name in names}


def _make_call(function: Function, inputs: Inputs, direction: str) -> Call:
    """One call of one direction; the backward replays the graph that is built here."""
    if direction == "forward":

        def forward() -> object:
            with torch.no_grad():
                return function(inputs)

        return forward
    leaves = inputs.leaves()
    if direction == "step":
        return lambda: torch.autograd.grad(function(leaves), leaves.wanted, leaves.grad)
    out = function(leaves)
    return lambda: torch.autograd.grad(out, leaves.wanted, leaves.grad, retain_graph=True)


def measure_problem(
    problem: AttentionProblem,
    device: torch.device,
    ceilings: Ceilings,
    directions: Sequence[str],
    variants: Sequence[str],
    seconds: float,
    say: Say,
) -> list[dict]:
    """Check and time one problem; returns its records, none where the check is red."""
    inputs = problem.make(device, seed=0)
    errors, passed = check(problem, inputs)
    told = ", ".join(f"{name} {error:.3g}" for name, error in errors.items())
    say(f"{problem.case} {problem.dtype}: max error {told}: {'right' if passed else 'RED'}")
    if not passed:
        return []
    release_memory()
    functions = contenders(problem, variants)
    records = []
    for direction in directions:
        floor_ms = problem.live_bytes(direction) / ceilings.copy_tbs * 1e-9
        built: list[Candidate] = []
        for name, function in functions.items():
            held = held_mib()
            try:
                call = _make_call(function, inputs, direction)
                call()
                peak = peak_mib(call, held) if device.type == "cuda" else None
            except Exception as failure:
                say(f"  {direction} {name}: {describe(failure).message}")
                continue
            plain = direction == "forward" and name in ("fastswin", "eager", "sdpa")
            built.append(Candidate(name, call, capturable=plain, peak_mib=peak))
        for name, timing in measure(built, make_clock(device), seconds=seconds).items():
            worst = errors["out" if direction == "forward" else "dqkv"]
            records += _record(problem, name, direction, timing, floor_ms, worst, say)
        del built
        release_memory()
    return records


def _record(
    problem: AttentionProblem,
    variant: str,
    direction: str,
    timing: Timing | Failure,
    floor_ms: float,
    error: float,
    say: Say,
) -> list[dict]:
    if isinstance(timing, Failure):
        say(f"  {direction:8} {variant:12} {timing.status}: {timing.message}")
        return []
    percent = 100 * floor_ms / timing.median_ms
    say(f"  {direction:8} {variant:12} {timing.median_ms:8.4f} ms  {percent:5.1f} % of copy")
    record = {
        "case": problem.case, "dtype": problem.dtype, "batch": problem.batch, "variant": variant,
        "direction": direction, "median_ms": timing.median_ms, "p20_ms": timing.p20_ms,
        "p80_ms": timing.p80_ms, "peak_mib": timing.peak_mib, "roofline_ms": floor_ms,
        "graph": timing.graph,
    }  # fmt: skip
    if variant == "fastswin":
        record["max_abs_err"] = error
    return [record]


def check_cases(names: Sequence[str]) -> None:
    """Raise ValueError, listing the known ones, where a case does not exist."""
    known = [problem.case for problem in PROBLEMS]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"unknown cases {unknown}; known: {', '.join(known)}")


def run(
    device: torch.device,
    root: Path,
    names: Sequence[str],
    seconds: float,
    deadline_s: float,
    say: Say = _print_line,
    backward: bool = False,
    variants: Sequence[str] = VARIANTS,
) -> AttentionResult:
    """Measure the problems and write ``<root>/<card>/window_attention.json`` after each.

    Args:
        device: where to measure.
        root: folder of the records.
        names: cases to measure; empty takes all.
        seconds: per contender and direction.
        deadline_s: problems that would start later are skipped.
        say: receives readable lines.
        backward: also time the backward, and forward + backward.
        variants: of :data:`VARIANTS`.

    Raises:
        ValueError: an unknown case or variant; nothing is run or written.
    """
    check_cases(names)
    if not set(variants) <= set(VARIANTS):
        raise ValueError(f"variants must be among {', '.join(VARIANTS)}, got {list(variants)}")
    start = time.monotonic()
    ceilings = measure_ceilings(device, ["fp16" if device.type == "cuda" else "fp32"])
    info = make_run_info(
        SUITE, device, ceilings.copy_tbs, next(iter(ceilings.gemm_tflops.values()))
    )
    path = result_path(root, info)
    say(f"{info.gpu}: copy {ceilings.copy_tbs:.3f} TB/s, torch {info.torch}")
    directions = ("forward", "backward", "step") if backward else ("forward",)
    wrong: list[str] = []
    measured: list[dict] = []
    for problem in PROBLEMS:
        if names and problem.case not in names:
            continue
        if time.monotonic() - start > deadline_s:
            wrong.append(f"{problem.case}: skipped, the deadline of {deadline_s:.0f} s is over")
            say(wrong[-1])
            continue
        records = measure_problem(problem, device, ceilings, directions, variants, seconds, say)
        if records:
            records = [stamp(info, record) for record in records]
            save_records(path, info, records)
            measured += records
        else:
            wrong.append(f"{problem.case}: red, no speed")
        release_memory()
    return AttentionResult(make_document(info, measured), path, tuple(wrong))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0 all right, 1 something red or skipped."""
    parser = argparse.ArgumentParser(prog="fastswin.bench.op_window_attention")
    parser.add_argument("--out", type=Path, default=DEFAULT_ROOT, help="folder of the records")
    parser.add_argument("--deadline-s", type=float, default=480.0)
    parser.add_argument("--seconds", type=float, default=0.3, help="per contender and direction")
    parser.add_argument("--cases", default="", help="comma-separated; all by default")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--workers", type=int, default=12, help="compiling processes of --sweep")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    names = [name for name in options.cases.split(",") if name]
    try:
        check_cases(names)
        if options.sweep:
            from fastswin.bench.op_window_attention_sweep import sweep

            sweep(device, names, options.workers, options.deadline_s)
            return 0
        result = run(
            device, options.out, names, options.seconds, options.deadline_s,
            backward=options.backward, variants=options.variants.split(","),
        )  # fmt: skip
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return result.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
