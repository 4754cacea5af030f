"""``python -m fastswin.bench.op_window_attention``: window attention against what people use.

Every problem is checked first (fp64 oracle: output, dqkv, dbias, all elements), then timed; a red
problem prints no speed. Contenders take qkv in image order and return image order: eager, eager
compiled, SDPA with bias and mask expanded to every window (compiled, too), FlexAttention compiled.
The roofline is the bytes of qkv, output and their gradients, each moved once, over the copy rate
of the same run. All are timed inside CUDA graphs. Peak memory is that of one call, its results
(output, gradients) included, beside the inputs.

    --backward   also times the backward alone and forward + backward ("step")
    --warm       fills torch.compile's caches instead, --workers processes side by side
    --sweep      tries launch configurations of the backward instead and prints the best ones
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fastswin.bench.captured import Call, captured_candidate
from fastswin.bench.failures import Failure, describe, release_memory
from fastswin.bench.memory import held_mib, peak_mib
from fastswin.bench.op_suite import (
    OperatorResult,
    Say,
    check_cases,
    make_parser,
    make_record,
    print_line,
    run_operator_suite,
)
from fastswin.bench.op_window_attention_problems import (
    PROBLEMS,
    AttentionProblem,
    Function,
    Inputs,
)
from fastswin.bench.record import Record
from fastswin.bench.roofline import Ceilings
from fastswin.bench.timing import Candidate, Timing, make_clock, measure
from fastswin.testing.tolerance import compare_to_oracle

SUITE = "window_attention"
VARIANTS = ("fastswin", "eager", "compile", "sdpa", "sdpa-compile", "flex")

#: Calls in one CUDA graph: the qkv of one call alone (80 MB and more) leaves nothing in L2.
CAPTURED_CALLS = 4


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


def make_call(function: Function, inputs: Inputs, leaves: Inputs, direction: str) -> Call:
    """One call of one direction; the backward replays the graph that is built here."""
    if direction == "forward":

        def forward() -> object:
            with torch.no_grad():
                return function(inputs)

        return forward
    if direction == "step":
        return lambda: torch.autograd.grad(function(leaves), leaves.wanted, leaves.grad)
    out = function(leaves)
    return lambda: torch.autograd.grad(out, leaves.wanted, leaves.grad, retain_graph=True)


def _peak_mib(made: Callable[[], Call]) -> float:
    """Peak memory of one call above what is held without it."""
    held = held_mib()
    call = made()
    call()
    return peak_mib(call, held)


def measure_problem(
    problem: AttentionProblem,
    device: torch.device,
    ceilings: Ceilings,
    directions: Sequence[str],
    variants: Sequence[str],
    seconds: float,
    say: Say,
) -> list[Record]:
    """Check and time one problem; returns its records, none where the check is red."""
    inputs = problem.make(device, seed=0)
    errors, passed = check(problem, inputs)
    told = ", ".join(f"{name} {error:.3g}" for name, error in errors.items())
    say(f"{problem.case} {problem.dtype}: max error {told}: {'right' if passed else 'RED'}")
    if not passed:
        return []
    release_memory()
    functions = contenders(problem, variants)
    leaves = inputs.leaves()
    calls = CAPTURED_CALLS if device.type == "cuda" else 0
    records = []
    for direction in directions:
        floor_ms = problem.live_bytes(direction) / ceilings.copy_tbs * 1e-9
        built: list[Candidate] = []
        for name, function in functions.items():
            made_call = functools.partial(make_call, function, inputs, leaves, direction)
            try:
                # before the next graph's pool holds memory; the compiled code has to stay
                peak = _peak_mib(made_call) if device.type == "cuda" else None
                made = captured_candidate(name, made_call, calls)
                built.append(dataclasses.replace(made, peak_mib=peak))
            except Exception as failure:
                say(f"  {direction} {name}: {describe(failure).message}")
        for name, timing in measure(built, make_clock(device), seconds=seconds).items():
            worst = errors["out" if direction == "forward" else "dqkv"]
            records += _record(problem, name, direction, timing, calls, floor_ms, worst, say)
        del built
        release_memory()
    return records


def _record(
    problem: AttentionProblem,
    variant: str,
    direction: str,
    timing: Timing | Failure,
    captured_calls: int,
    floor_ms: float,
    error: float,
    say: Say,
) -> list[Record]:
    if isinstance(timing, Failure):
        say(f"  {direction:8} {variant:12} {timing.status}: {timing.message}")
        return []
    calls = max(1, captured_calls)
    median_ms = timing.median_ms / calls
    percent = 100 * floor_ms / median_ms
    memory = "" if timing.peak_mib is None else f"  {timing.peak_mib:7.1f} MiB"
    say(f"  {direction:8} {variant:12} {median_ms:8.4f} ms  {percent:5.1f} % of copy{memory}")
    record = make_record(
        problem.case, problem.dtype, problem.batch, variant, direction, timing, floor_ms, error,
        calls=calls, graph=captured_calls > 0,
    )  # fmt: skip
    return [record]


def run(
    device: torch.device,
    root: Path,
    names: Sequence[str],
    seconds: float,
    deadline_s: float,
    say: Say = print_line,
    backward: bool = False,
    variants: Sequence[str] = VARIANTS,
) -> OperatorResult:
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
    if not set(variants) <= set(VARIANTS):
        raise ValueError(f"variants must be among {', '.join(VARIANTS)}, got {list(variants)}")
    directions = ("forward", "backward", "step") if backward else ("forward",)

    def measured(problem: AttentionProblem, ceilings: Ceilings) -> list[Record]:
        return measure_problem(problem, device, ceilings, directions, variants, seconds, say)

    return run_operator_suite(SUITE, PROBLEMS, measured, device, root, names, deadline_s, say)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0 all right, 1 something red or skipped."""
    parser = make_parser("fastswin.bench.op_window_attention", 0.3)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--warm", action="store_true")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    names = [name for name in options.cases.split(",") if name]
    try:
        check_cases(names, PROBLEMS)
        if options.sweep:
            from fastswin.bench.op_window_attention_sweep import sweep

            sweep(device, names, options.workers, options.deadline_s)
            return 0
        variants = options.variants.split(",")
        if options.warm:
            from fastswin.bench.op_window_attention_warm import warm

            warm(device, names, variants, options.workers, options.backward, print_line)
            return 0
        result = run(
            device, options.out, names, options.seconds, options.deadline_s,
            backward=options.backward, variants=variants,
        )  # fmt: skip
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return result.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
