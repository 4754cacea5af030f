"""``python -m fastswin.bench.op_softmax``: the masked-softmax operators against eager and compile.

Every problem is checked first (fp64 oracle, forward and backward, all elements), then timed; a
red problem prints no speed. The roofline is live bytes over the copy rate of the same run: what
is read and written once by an ideal kernel, dead tiles of a causal problem not counted as read.
The contender "copy" moves as many bytes as the problem does, half of them read and half written:
what start and tail of a launch leave of the rate at that size.

    --sweep   tries launch configurations of every problem instead and prints the best ones
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
from fastswin.bench.op_softmax_problems import PROBLEMS, Inputs, SoftmaxProblem
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
from fastswin.testing.tolerance import compare_to_oracle

SUITE = "softmax"

#: Input sets of one problem hold at least this together, so that no call finds its data in L2.
DISTINCT_BYTES = 2**28

#: Calls in one CUDA graph: enough to read this much, so that no launch from the host is timed. A
#: first launch after a wait costs up to 1 ms here, a tenth of a 10 ms sample.
CAPTURED_BYTES = 2**30
MAX_CAPTURED_CALLS = 16

#: 4-byte words; both halves of a copy begin at a multiple of as many.
COPY_ALIGNMENT = 128

Function = Callable[..., torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Checked:
    """Largest errors of one problem and whether every chunk passed its gate."""

    forward: float
    backward: float
    dbias: float
    passed: bool


def check(problem: SoftmaxProblem, inputs: Inputs) -> Checked:
    """Compare fastswin with the fp64 oracle, in chunks of the leading axis."""
    dtype = problem.torch_dtype
    x = inputs.x.detach().requires_grad_()
    bias = None if inputs.bias is None else inputs.bias.detach().requires_grad_()
    wanted = [x] if bias is None else [x, bias]
    y = problem.fastswin(dataclasses.replace(inputs, x=x, bias=bias))
    grads = torch.autograd.grad(y, wanted, inputs.grad)
    worst = [0.0, 0.0]
    passed = True
    sums = None if bias is None else torch.zeros(bias.shape, dtype=torch.float64, device=x.device)
    eager_sums = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    for part in problem.chunks():
        sliced = inputs.slice(part)
        results = {}
        for name, kind in (("oracle", torch.float64), ("eager", dtype)):
            own = sliced.to(kind)
            leaf = own.x.requires_grad_()
            leaf_bias = None if own.bias is None else own.bias.detach().requires_grad_()
            leaves = [leaf] if leaf_bias is None else [leaf, leaf_bias]
            out = problem.eager(dataclasses.replace(own, x=leaf, bias=leaf_bias))
            found = torch.autograd.grad(out, leaves, own.grad)
            results[name] = (out.detach(), *found)
        for index, ours in enumerate((y.detach()[part], grads[0][part])):
            gate = compare_to_oracle(ours, results["eager"][index], results["oracle"][index], dtype)
            worst[index] = max(worst[index], gate.max_error)
            passed = passed and gate.passed
        if sums is not None and eager_sums is not None:
            sums += results["oracle"][2]
            eager_sums += results["eager"][2].float()
    dbias_error = 0.0
    if bias is not None and sums is not None and eager_sums is not None:
        gate = compare_to_oracle(grads[1], eager_sums.to(bias.dtype), sums, bias.dtype)
        dbias_error, passed = gate.max_error, passed and gate.passed
    return Checked(worst[0], worst[1], dbias_error, passed)


def _compiled(function: Function) -> Function:
    compiled = torch.compile(function, fullgraph=True, dynamic=False)

    def call(inputs: Inputs) -> torch.Tensor:
        # the backward is timed again and again on one graph
        with torch._functorch.config.patch(donated_buffer=False):
            return compiled(inputs.x, inputs.bias, inputs.mask, inputs.lens)

    return call


def _with_graph(
    function: Function, inputs: Inputs
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Output, leaves and upstream gradient of one differentiable call."""
    x = inputs.x.detach().requires_grad_()
    bias = None if inputs.bias is None else inputs.bias.detach().requires_grad_()
    y = function(dataclasses.replace(inputs, x=x, bias=bias))
    return y, [x] if bias is None else [x, bias], inputs.grad


def _make_call(function: Function, sets: Sequence[Inputs], direction: str) -> Call:
    """One call on the next input set; a backward replays one of the graphs built here."""
    turn = iter(range(2**62))
    if direction == "forward":

        def forward() -> object:
            with torch.no_grad():
                return function(sets[next(turn) % len(sets)])

        return forward
    graphs = [_with_graph(function, inputs) for inputs in sets]

    def backward() -> object:
        y, leaves, grad = graphs[next(turn) % len(graphs)]
        return torch.autograd.grad(y, leaves, grad, retain_graph=True)

    return backward


def _copy_call(moved_bytes: int, device: torch.device) -> Call:
    """Kernels that read and write ``moved_bytes`` together, on tensors that L2 cannot hold.

    A negation: ``copy_`` would be a memcpy node of the graph, 2.7 instead of 4.25 TB/s (H200).
    """
    words = max(COPY_ALIGNMENT, moved_bytes // 8 // COPY_ALIGNMENT * COPY_ALIGNMENT)
    count = min(MAX_CAPTURED_CALLS, max(1, -(-DISTINCT_BYTES // (8 * words))))
    pairs = [torch.zeros(2, words, dtype=torch.int32, device=device) for _ in range(count)]
    turn = iter(range(2**62))

    def call() -> object:
        source, target = pairs[next(turn) % count]
        return torch.neg(source, out=target)

    return call


def measure_problem(
    problem: SoftmaxProblem, device: torch.device, ceilings: Ceilings, seconds: float, say: Say
) -> list[Record]:
    """Check and time one problem; returns its records, none where the check is red."""
    inputs = problem.make(device, seed=0)
    checked = check(problem, inputs)
    say(
        f"{problem.case} {problem.dtype}: max error forward {checked.forward:.3g}, "
        f"dx {checked.backward:.3g}, dbias {checked.dbias:.3g}: "
        f"{'right' if checked.passed else 'RED'}"
    )
    if not checked.passed:
        return []
    release_memory()
    count = min(8, max(1, -(-DISTINCT_BYTES // (2 * inputs.x.nbytes))))
    sets = [inputs, *(problem.make(device, seed=s) for s in range(1, count))]
    captured_calls = 0
    if device.type == "cuda":
        captured_calls = max(1, min(MAX_CAPTURED_CALLS, CAPTURED_BYTES // inputs.x.nbytes))
    records = []
    for direction in ("forward", "backward"):
        floor_ms = problem.live_bytes(inputs, direction) / ceilings.copy_tbs * 1e-9
        contenders: dict[str, Function] = {
            "fastswin": problem.fastswin,
            "eager": problem.eager,
            "compile": _compiled(problem.eager_function),
        }
        built: list[Candidate] = []
        moved = problem.live_bytes(inputs, direction)
        copied = functools.partial(_copy_call, moved, device)
        built.append(captured_candidate("copy", copied, captured_calls))
        for name, function in contenders.items():
            try:
                call = functools.partial(_make_call, function, sets, direction)
                built.append(captured_candidate(name, call, captured_calls))
            except Exception as error:
                say(f"  {direction} {name}: {describe(error).message}")
        timings = measure(built, make_clock(device), seconds=seconds)
        worst = checked.forward if direction == "forward" else checked.backward
        for name, timing in timings.items():
            records += _record(
                problem, name, direction, timing, captured_calls, floor_ms, inputs, worst, say
            )
        del built
        release_memory()
    return records


def _record(
    problem: SoftmaxProblem,
    variant: str,
    direction: str,
    timing: Timing | Failure,
    captured_calls: int,
    floor_ms: float,
    inputs: Inputs,
    error: float,
    say: Say,
) -> list[Record]:
    if isinstance(timing, Failure):
        say(f"  {direction:8} {variant:9} {timing.status}: {timing.message}")
        return []
    calls = max(1, captured_calls)
    median_ms = timing.median_ms / calls
    live_tbs = problem.live_bytes(inputs, direction) / median_ms * 1e-9
    say(
        f"  {direction:8} {variant:9} {median_ms:8.4f} ms  {live_tbs:6.3f} TB/s  "
        f"{100 * floor_ms / median_ms:5.1f} % of copy"
    )
    record = make_record(
        problem.case, problem.dtype, problem.shape[0], variant, direction, timing, floor_ms, error,
        calls=calls, graph=captured_calls > 0, live_tbs=live_tbs,
    )  # fmt: skip
    return [record]


def run(
    device: torch.device,
    root: Path,
    names: Sequence[str],
    seconds: float,
    deadline_s: float,
    say: Say = print_line,
) -> OperatorResult:
    """Measure the problems and write ``<root>/<card>/softmax.json`` after each.

    Args:
        device: where to measure.
        root: folder of the records.
        names: cases to measure; empty takes all.
        seconds: per contender and direction.
        deadline_s: problems that would start later are skipped.
        say: receives readable lines.

    Raises:
        ValueError: an unknown case; nothing is run or written.
    """

    def measured(problem: SoftmaxProblem, ceilings: Ceilings) -> list[Record]:
        return measure_problem(problem, device, ceilings, seconds, say)

    return run_operator_suite(SUITE, PROBLEMS, measured, device, root, names, deadline_s, say)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0 all right, 1 something red or skipped."""
    parser = make_parser("fastswin.bench.op_softmax", 0.5, __doc__)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    names = [name for name in options.cases.split(",") if name]
    try:
        check_cases(names, PROBLEMS)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.sweep:
        from fastswin.bench.op_softmax_sweep import sweep

        sweep(device, names, options.workers, options.deadline_s)
        return 0
    return run(device, options.out, names, options.seconds, options.deadline_s).exit_code


if __name__ == "__main__":
    raise SystemExit(main())
