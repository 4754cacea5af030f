"""The softmax suite on tiny problems: records only after a green check, sweeps that make sense."""

import json

import pytest
import torch

from fastswin.bench import op_softmax, op_suite
from fastswin.bench.op_softmax_candidates import configurations
from fastswin.bench.op_softmax_problems import PROBLEMS, SoftmaxProblem
from fastswin.bench.roofline import Ceilings

TINY = (
    SoftmaxProblem("masked", (2, 3, 8, 8), "fp32"),
    SoftmaxProblem("window", (8, 3, 9, 9), "fp32", windows=4),
    SoftmaxProblem("tril", (3, 2, 10, 10), "fp32"),
    SoftmaxProblem("rows", (4, 300), "fp32"),
)
CPU = torch.device("cpu")


@pytest.fixture
def _tiny(monkeypatch, brief_timing):
    monkeypatch.setattr(op_softmax, "PROBLEMS", TINY)
    ceilings = Ceilings(0.01, {"fp32": 0.1})
    monkeypatch.setattr(op_suite, "measure_ceilings", lambda *_: ceilings)
    monkeypatch.setattr(op_softmax, "_compiled", lambda f: _plain(f))


def _plain(function):
    return lambda i: function(i.x, i.bias, i.mask, i.lens)


@pytest.mark.usefixtures("_tiny")
def test_records_of_every_problem_and_direction(tmp_path):
    assert op_softmax.run(CPU, tmp_path, [], 0.005, 600.0).exit_code == 0
    (path,) = tmp_path.glob("*/softmax.json")
    records = json.loads(path.read_text())["records"]
    found = {(r["case"], r["variant"], r["direction"]) for r in records}
    variants = ("copy", "fastswin", "eager", "compile")
    directions = ("forward", "backward")
    assert found == {(p.case, v, d) for p in TINY for v in variants for d in directions}
    assert all(r["roofline_ms"] > 0 and r["live_tbs"] > 0 for r in records)


@pytest.mark.usefixtures("_tiny")
def test_a_wrong_result_writes_nothing(tmp_path, monkeypatch):
    wrong = lambda self, i: self.eager(i) * 1.01  # noqa: E731
    monkeypatch.setattr(SoftmaxProblem, "fastswin", wrong)
    assert op_softmax.run(CPU, tmp_path, ["rows_4x300"], 0.005, 600.0).exit_code == 1
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.usefixtures("_tiny")
def test_past_the_deadline_problems_are_named_and_not_green(tmp_path, capsys):
    assert op_softmax.run(CPU, tmp_path, ["rows_4x300"], 0.005, -1.0).exit_code == 1
    assert "rows_4x300: skipped" in capsys.readouterr().out


def test_dead_elements_are_not_counted_as_read():
    problem = SoftmaxProblem("tril", (2, 3, 10, 10), "fp32")
    inputs = problem.make(CPU, seed=0)
    live = sum(n * (n + 1) // 2 for n in inputs.lens.tolist()) * 3
    assert problem.live_bytes(inputs, "forward") == 4 * (live + 600)
    assert problem.live_bytes(inputs, "backward") == 4 * (2 * live + 600)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.case)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_sweeps_cover_rows_and_start_with_the_default(problem, direction):
    found = configurations(problem, direction)
    assert found[0] is None
    assert 5 < len(found) == len(set(found)) < 120
    for config in found[1:]:
        assert config.block_rows * config.block_keys >= 32 * config.num_warps


def test_unknown_case(capsys):
    assert op_softmax.main(["--cases", "window_1x1"]) == 2
    assert "unknown cases" in capsys.readouterr().err
