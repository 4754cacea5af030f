"""``python -m fastswin.bench.op_mlp``: the MLP half of a block in one kernel against other ways.

Every problem is checked first: one kernel and its parts against fp64 on inputs of the problem's
dtype, no further from it than twice eager's error (largest and relative RMS), three runs bitwise,
outputs poisoned. A red problem prints no speed. All are timed inside CUDA graphs of calls whose
rows and weights are their own, as those of a stage's blocks are. The roofline is 16 M C**2 FLOPs
over the product rate or the bytes of rows and weights over the copy rate of the same run.

    --warm       compiles instead, --workers processes side by side, into the caches on disk
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fastswin.bench.captured import captured_candidate
from fastswin.bench.failures import Failure, describe
from fastswin.bench.memory import held_mib, peak_mib
from fastswin.bench.op_mlp_contenders import OURS, VARIANTS, Function, Operands, contenders
from fastswin.bench.op_mlp_problems import PROBLEMS, MlpProblem, eager
from fastswin.bench.op_suite import (
    OperatorResult,
    Say,
    check_cases,
    make_parser,
    make_record,
    print_line,
    run_operator_suite,
)
from fastswin.bench.record import Record
from fastswin.bench.roofline import Ceilings
from fastswin.bench.timing import Candidate, Timing, make_clock, measure
from fastswin.testing.poison import PoisonEmpty
from fastswin.testing.tolerance import assert_close_to_oracle

SUITE = "mlp"

#: Calls of a timed chain, each with rows and weights of its own.
CHAIN = {"cuda": 4, "cpu": 1}

#: Runs that have to give the same bits.
RUNS = 3


@dataclasses.dataclass(frozen=True)
class Judge:
    """A problem's operands with what eager and fp64 make of them."""

    operands: Operands
    eager: torch.Tensor
    oracle: torch.Tensor

    @classmethod
    def of(cls, operands: Operands) -> Judge:
        """Compute both."""
        given = operands.inputs
        return cls(operands, eager(given), eager(given.to(torch.float64)))

    def verdict(self, function: Function) -> tuple[float, str]:
        """Largest error of a contender, and what is wrong with it, "" if nothing."""
        made = []
        for _ in range(RUNS):
            self.operands.out.fill_(float("nan"))
            with PoisonEmpty():
                made.append(function(self.operands).clone())
        try:
            gate = assert_close_to_oracle(made[0], self.eager, self.oracle, self.eager.dtype)
        except AssertionError as error:
            return float("nan"), str(error)
        same = all(torch.equal(made[0], other) for other in made[1:])
        return gate.max_error, "" if same else "runs differ"


def check(
    functions: dict[str, Function], operands: Operands, name: str, say: Say
) -> dict[str, float] | None:
    """Largest errors of our contenders, None where one of them is wrong.

    Args:
        functions: contenders by variant.
        operands: of the problem.
        name: of the problem, in lines.
        say: receives one line per contender.
    """
    judge, errors, right = Judge.of(operands), {}, True
    for variant in OURS:
        if variant not in functions:
            continue
        try:
            errors[variant], wrong = judge.verdict(functions[variant])
        except Exception as error:  # a kernel that does not compile, too
            errors[variant], wrong = float("nan"), describe(error).message
        right = right and not wrong
        told = f"RED {wrong}" if wrong else f"max error {errors[variant]:.3g}: right"
        say(f"{name} {variant}: {told}")
    return errors if right else None


def measure_problem(
    problem: MlpProblem,
    device: torch.device,
    ceilings: Ceilings,
    variants: Sequence[str],
    seconds: float,
    say: Say,
) -> list[Record]:
    """Check and time one problem; returns its records, none where the check is red.

    Args:
        problem: which.
        device: where.
        ceilings: copy and product rate of this run.
        variants: of :data:`VARIANTS`.
        seconds: per contender.
        say: receives readable lines.
    """
    name = f"{problem.case} {problem.dtype}"
    chain = [Operands.make(problem, device, seed) for seed in range(CHAIN[device.type])]
    functions = contenders(problem, variants, device)
    with torch.no_grad():
        errors = check(functions, chain[0], name, say)
        if errors is None:
            return []
        built: list[Candidate] = []
        for variant, function in functions.items():
            try:
                built.append(_candidate(variant, function, chain))
            except Exception as failure:  # one that cannot be built leaves the others
                say(f"  {variant}: {describe(failure).message}")
        timings = measure(built, make_clock(device), seconds=seconds)
    records = []
    for variant, timing in timings.items():
        if isinstance(timing, Failure):
            say(f"  {variant:8} {timing.status}: {timing.message}")
            continue
        error = errors.get(variant, float("nan"))
        records.append(_record(problem, device, variant, timing, len(chain), ceilings, error))
        percent = 100 * records[-1]["roofline_ms"] / records[-1]["median_ms"]
        say(f"  {variant:8} {records[-1]['median_ms']:8.4f} ms  {percent:5.1f} % of roofline")
    return records


def _candidate(variant: str, function: Function, chain: Sequence[Operands]) -> Candidate:
    """A chain of calls, captured on a GPU, with the peak memory of one call."""
    on_gpu = chain[0].out.is_cuda
    # before the next graph's pool holds memory
    peak = _peak_mib(variant, function, chain[0]) if on_gpu else None

    def calls() -> None:
        for operands in chain:
            function(operands)

    made = captured_candidate(variant, lambda: calls, 1 if on_gpu else 0)
    return dataclasses.replace(made, peak_mib=peak)


def _peak_mib(variant: str, function: Function, operands: Operands) -> float:
    """Peak memory of one call, its output included, above what is held without it."""

    def call() -> torch.Tensor:
        if variant not in OURS:
            return function(operands)
        return function(dataclasses.replace(operands, out=torch.empty_like(operands.out)))

    call()
    return peak_mib(call, held_mib())


def _record(
    problem: MlpProblem,
    device: torch.device,
    variant: str,
    timing: Timing,
    calls: int,
    ceilings: Ceilings,
    error: float,
) -> Record:
    record = make_record(
        problem.case, problem.dtype, problem.batch, variant, "forward", timing,
        problem.floor_ms(ceilings), error, calls=calls, graph=device.type == "cuda",
        rows=problem.rows, channels=problem.channels,
        tflops=problem.flops * calls / timing.median_ms * 1e-9,
    )  # fmt: skip
    if variant == "fastswin":
        record["kernel"] = str(problem.tiles(device) or "reference")
    return record


def run(
    device: torch.device,
    root: Path,
    names: Sequence[str],
    seconds: float,
    deadline_s: float,
    say: Say = print_line,
    variants: Sequence[str] = VARIANTS,
) -> OperatorResult:
    """Measure the problems and write ``<root>/<card>/mlp.json`` after each.

    Args:
        device: where to measure; a GPU leaves out, with a line, what it has no kernel for.
        root: folder of the records.
        names: cases to measure; empty takes all.
        seconds: per contender.
        deadline_s: problems that would start later are skipped.
        say: receives readable lines.
        variants: of :data:`VARIANTS`.

    Returns:
        The records of this run and what was not measured.

    Raises:
        ValueError: an unknown case or variant; nothing is run or written.
    """
    if not set(variants) <= set(VARIANTS):
        raise ValueError(f"variants must be among {', '.join(VARIANTS)}, got {list(variants)}")
    check_cases(names, PROBLEMS)
    blockers = {problem: problem.blocker(device) for problem in PROBLEMS}
    for problem, blocker in blockers.items():
        if blocker and (not names or problem.case in names):
            say(f"{problem.case} {problem.dtype}: left out: {blocker}")
    able = [problem for problem, blocker in blockers.items() if blocker is None]
    wanted = [problem for problem in able if not names or problem.case in names]

    def measured(problem: MlpProblem, ceilings: Ceilings) -> list[Record]:
        return measure_problem(problem, device, ceilings, variants, seconds, say)

    return run_operator_suite(SUITE, wanted, measured, device, root, (), deadline_s, say)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0 all right, 1 something red or skipped, 2 wrong."""
    parser = make_parser("python -m fastswin.bench.op_mlp", 0.3)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument("--warm", action="store_true", help="compile instead")
    options = parser.parse_args(arguments)
    if options.sweep:
        parser.error("--sweep: tiles of this operator are tried by `fastswin tune`")
    device = torch.device(options.device)
    names = [name for name in options.cases.split(",") if name]
    variants = options.variants.split(",")
    try:
        if options.warm:
            from fastswin.bench.op_mlp_warm import warm

            check_cases(names, PROBLEMS)
            warm(device, names, variants, options.workers, print_line)
            return 0
        result = run(
            device, options.out, names, options.seconds, options.deadline_s, variants=variants
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return result.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
