"""From tensors to the library's arguments, with the GPU's part of the library stood in for."""

from __future__ import annotations

import ctypes
import types
import weakref

import pytest
import torch
from library_linear_cases import operand

from fastswin import ops
from fastswin.ops.library_linear import launch, plan
from fastswin.ops.library_linear.constants import HeuristicResult, Matmul
from fastswin.ops.library_linear.library import LibraryLinearError
from fastswin.ops.library_linear.plan import Plan, Pointers
from fastswin.ops.library_linear.problem import FP8, MAX_ALIGNMENT, Problem, alignment_of


def tensors(M=4, N=32, K=16, dtype=torch.float16, out_dtype=None):
    out_dtype = out_dtype or dtype
    return {
        "x": operand((M, K), dtype, 1), "weight": operand((N, K), dtype, 2), "bias": None,
        "scale": None, "row_scale": None, "gelu": False, "residual": None, "output_inverse": None,
        "out": torch.zeros(M, N).to(out_dtype),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("address", "alignment"), [(0, 256), (2, 2), (96, 32), (256, 256), (4096 + 128, 128)]
)
def test_alignment_of_an_address(address, alignment):
    assert alignment_of(address) == alignment


def test_equal_calls_share_a_problem():
    made = tensors()
    first, pointers = launch.describe(**made)
    again, _ = launch.describe(**(made | {"x": made["x"].clone()}))
    assert (first.M, first.N, first.K) == (4, 32, 16)
    assert hash(first) == hash(again) or first.alignments != again.alignments
    assert pointers.x == made["x"].data_ptr()
    assert pointers.out == made["out"].data_ptr()
    assert pointers.bias == pointers.residual == pointers.scale == 0


@pytest.mark.parametrize(
    "change",
    [
        {"x": operand((5, 16), torch.float16, 1), "out": torch.zeros(5, 32).half()},
        {"bias": torch.zeros(32).half()},
        {"residual": torch.zeros(4, 32).half()},
        {"scale": torch.ones(1)},
        {"gelu": True},
        {"output_inverse": torch.ones(1)},
    ],
    ids=["rows", "bias", "residual", "scale", "gelu", "output_scale"],
)
def test_every_difference_makes_another_problem(change):
    """Alignments set aside, which differ from allocation to allocation."""
    aligned = {"alignments": (MAX_ALIGNMENT,) * 5}
    base, _ = launch.describe(**tensors())
    other, _ = launch.describe(**(tensors() | change))
    assert vars(base) | aligned != vars(other) | aligned


def test_misaligned_view_makes_another_problem():
    made = tensors()
    base, _ = launch.describe(**made)
    memory = torch.zeros(4 * 16 + 1).half()
    moved, _ = launch.describe(**(made | {"x": memory[1:].view(4, 16)}))
    assert moved.alignments[1] == 2
    assert moved != base


def test_in_place_residual_is_one_address():
    made = tensors()
    problem, pointers = launch.describe(**(made | {"residual": made["out"]}))
    assert problem.residual
    assert pointers.residual == pointers.out


def test_plans_are_made_once_and_dropped_oldest_first(monkeypatch):
    made: list[Problem] = []

    def make(problem, device_index, pointers):
        made.append(problem)
        return types.SimpleNamespace(problem=problem)

    monkeypatch.setattr(launch, "Plan", make)
    monkeypatch.setattr(launch, "_plans", type(launch._plans)())
    monkeypatch.setattr(launch, "MAX_PLANS", 2)
    a, b, c = (Problem(M, 32, 16, torch.float16, torch.float16) for M in (1, 2, 3))
    nothing = Pointers(0, 0, 0)
    first = launch.plan_for(a, 0, nothing)
    assert launch.plan_for(a, 0, nothing) is first
    launch.plan_for(b, 0, nothing)
    launch.plan_for(a, 0, nothing)  # b is now the oldest
    launch.plan_for(c, 0, nothing)
    launch.plan_for(a, 0, nothing)
    assert made == [a, b, c]
    launch.plan_for(b, 0, nothing)
    launch.plan_for(b, 1, nothing)  # another GPU has plans of its own
    assert made == [a, b, c, b, b]


class Recorder:
    """The library's two functions that need a GPU."""

    def __init__(self, algorithms: int = 2, status: int = 0, state: int = 0) -> None:
        self.algorithms, self.status, self.state = algorithms, status, state
        self.calls: list[tuple] = []

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments):  # noqa: N802
        found = ctypes.cast(arguments[8], ctypes.POINTER(HeuristicResult))
        for i in range(self.algorithms):
            found[i].state = self.state
        ctypes.cast(arguments[9], ctypes.POINTER(ctypes.c_int))[0] = self.algorithms
        return 0

    def cublasLtMatmul(self, *arguments):  # noqa: N802
        beta = ctypes.cast(arguments[7], ctypes.POINTER(ctypes.c_float))[0]
        self.calls.append((*arguments[3:7:2], beta, arguments[8], arguments[10], *arguments[14:]))
        return self.status


def make_plan(monkeypatch, problem: Problem, recorder: Recorder, pointers: Pointers) -> Plan:
    monkeypatch.setattr(plan, "load_library", lambda: recorder)
    monkeypatch.setattr(plan, "handle", lambda index: ctypes.c_void_p(1))
    return Plan(problem, 0, pointers)


def test_weight_is_the_first_operand_and_the_residual_is_c(monkeypatch):
    problem = Problem(4, 32, 16, torch.float16, torch.float16, torch.float16, residual=True)
    pointers = Pointers(x=16, weight=32, out=48, bias=64, residual=80)
    recorder = Recorder()
    made = make_plan(monkeypatch, problem, recorder, pointers)
    made.launch(pointers, stream=7)
    assert recorder.calls == [(32, 16, 1.0, 80, 48, 0, 7)]
    assert made.matmul.get(Matmul.BIAS_POINTER) == 64


def test_without_residual_nothing_is_added(monkeypatch):
    problem = Problem(4, 32, 16, torch.float16, torch.float16)
    pointers = Pointers(x=16, weight=32, out=48)
    recorder = Recorder()
    make_plan(monkeypatch, problem, recorder, pointers).launch(pointers, stream=7)
    assert recorder.calls == [(32, 16, 0.0, 48, 48, 0, 7)]


def test_fp8_output_reads_no_c_and_gets_its_scales(monkeypatch):
    problem = Problem(4, 32, 16, FP8, FP8, torch.float16, True, False, "tensor", True)
    pointers = Pointers(x=16, weight=32, out=48, bias=64, scale=96, output_scale=112)
    recorder = Recorder()
    made = make_plan(monkeypatch, problem, recorder, pointers)
    made.launch(pointers, stream=0)
    assert recorder.calls == [(32, 16, 0.0, None, 48, 0, 0)]
    assert made.matmul.get(Matmul.A_SCALE_POINTER) == 96
    assert made.matmul.get(Matmul.B_SCALE_POINTER) is None
    assert made.matmul.get(Matmul.D_SCALE_POINTER) == 112


def test_every_call_points_at_its_own_vectors(monkeypatch):
    problem = Problem(4, 32, 16, FP8, torch.float16, torch.float16, scaling="channel")
    first = Pointers(x=16, weight=32, out=48, bias=64, scale=96, row_scale=112)
    made = make_plan(monkeypatch, problem, Recorder(), first)
    made.launch(Pointers(x=16, weight=32, out=48, bias=128, scale=144, row_scale=160), stream=0)
    assert made.matmul.get(Matmul.BIAS_POINTER) == 128
    assert made.matmul.get(Matmul.A_SCALE_POINTER) == 144
    assert made.matmul.get(Matmul.B_SCALE_POINTER) == 160


def test_algorithm_beyond_the_list_is_refused_before_the_launch(monkeypatch):
    problem = Problem(4, 32, 16, torch.float16, torch.float16)
    pointers = Pointers(16, 32, 48)
    recorder = Recorder(algorithms=2)
    made = make_plan(monkeypatch, problem, recorder, pointers)
    made.launch(pointers, 0, algorithm=1)
    with pytest.raises(ValueError, match="config must be below 2"):
        made.launch(pointers, 0, algorithm=2)
    assert len(recorder.calls) == 1


def test_limits_of_the_search_live_while_it_runs(monkeypatch):
    """Freed with its object: a preference that nobody holds is a dangling pointer by then."""
    held: list[weakref.ref] = []
    alive: list[bool] = []
    original = plan.describe_preference

    def describe_preference(problem):
        made = original(problem)
        held.append(weakref.ref(made))
        return made

    class Search(Recorder):
        def cublasLtMatmulAlgoGetHeuristic(self, *arguments):  # noqa: N802
            alive.extend(reference() is not None for reference in held)
            return super().cublasLtMatmulAlgoGetHeuristic(*arguments)

    monkeypatch.setattr(plan, "describe_preference", describe_preference)
    problem = Problem(4, 32, 16, torch.float16, torch.float16)
    make_plan(monkeypatch, problem, Search(), Pointers(16, 32, 48))
    assert alive == [True]


@pytest.mark.parametrize(("algorithms", "state"), [(0, 0), (2, 15)], ids=["none", "unusable"])
def test_problem_without_algorithm_is_named(monkeypatch, algorithms, state):
    problem = Problem(4, 32, 16, torch.float16, torch.float16)
    with pytest.raises(LibraryLinearError, match=r"no algorithm for \[4, 16\].*NOT_SUPPORTED"):
        make_plan(monkeypatch, problem, Recorder(algorithms, state=state), Pointers(16, 32, 48))


def test_failed_launch_names_the_problem(monkeypatch):
    problem = Problem(4, 32, 16, torch.float16, torch.float16)
    pointers = Pointers(16, 32, 48)
    made = make_plan(monkeypatch, problem, Recorder(status=13), pointers)
    with pytest.raises(LibraryLinearError, match=r"cublasLtMatmul for .*EXECUTION_FAILED"):
        made.launch(pointers, 0)


@pytest.fixture
def recorded(monkeypatch):
    """The way from the public function to the launch, for tensors on a CPU."""
    from fastswin.ops.library_linear import api

    calls: list[tuple] = []

    def note(pointers, stream, algorithm):
        calls.append((pointers, stream, algorithm))

    def plan_for(problem, index, pointers):
        return types.SimpleNamespace(launch=note, problem=problem)

    monkeypatch.setattr(api, "_use_library", lambda *arguments, **words: True)
    monkeypatch.setattr(launch, "plan_for", plan_for)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=7)
    )
    return calls


def test_call_reaches_the_launch_on_the_current_stream(recorded):
    x, weight = operand((2, 3, 16), torch.float16, 1), operand((32, 16), torch.float16, 2)
    into = torch.zeros(2, 3, 32).half()
    y = ops.library_linear(x, weight, residual=into, out=into, config=3)
    ((pointers, stream, algorithm),) = recorded
    assert (stream, algorithm) == (7, 3)
    assert (pointers.x, pointers.weight) == (x.data_ptr(), weight.data_ptr())
    assert pointers.residual == pointers.out == into.data_ptr()
    assert y is into


def test_step_of_the_output_becomes_the_factor_that_the_library_wants(recorded, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        launch, "describe", lambda *given: (seen.update(inverse=given[7]), Pointers(0, 0, 0))
    )
    y = ops.library_linear(
        torch.zeros(4, 16).to(FP8), torch.zeros(32, 16).to(FP8), scale=torch.ones(1),
        output_scale=torch.tensor([0.25]), out_dtype=FP8,
    )  # fmt: skip
    assert seen["inverse"].item() == 4
    assert (y.shape, y.dtype) == ((4, 32), FP8)
    assert recorded[0][2] == 0


def test_no_rows_are_no_launch(recorded):
    y = ops.library_linear(torch.zeros(0, 16).half(), torch.zeros(32, 16).half())
    assert y.shape == (0, 32)
    assert recorded == []
