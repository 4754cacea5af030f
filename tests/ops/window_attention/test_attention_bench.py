"""The window-attention suite on tiny problems: records only after a green check."""

import json

import pytest
import torch

from fastswin.bench import op_suite, op_window_attention, op_window_attention_warm
from fastswin.bench.op_window_attention_problems import PROBLEMS, AttentionProblem
from fastswin.bench.op_window_attention_sweep import configurations
from fastswin.bench.roofline import Ceilings
from fastswin.ops.window_attention.backward_config import default_backward_config

TINY = (
    AttentionProblem("v1", 1, 6, 3, 1, dtype="fp32"),
    AttentionProblem("v2", 1, 4, 2, 1, cosine=True, dtype="fp32"),
)
CPU = torch.device("cpu")
PLAIN = ("fastswin", "eager", "sdpa")


@pytest.fixture
def _tiny(monkeypatch, brief_timing):
    monkeypatch.setattr(op_window_attention, "PROBLEMS", TINY)
    ceilings = Ceilings(0.01, {"fp32": 0.1})
    monkeypatch.setattr(op_suite, "measure_ceilings", lambda *_: ceilings)


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize("backward", [False, True])
def test_records_of_every_problem_and_direction(tmp_path, backward):
    result = op_window_attention.run(
        CPU, tmp_path, [], 0.005, 600.0, backward=backward, variants=PLAIN
    )
    assert result.exit_code == 0
    (path,) = tmp_path.glob("*/window_attention.json")
    records = json.loads(path.read_text())["records"]
    found = {(r["case"], r["variant"], r["direction"]) for r in records}
    directions = ("forward", "backward", "step") if backward else ("forward",)
    assert found == {(p.case, v, d) for p in TINY for v in PLAIN for d in directions}


@pytest.mark.usefixtures("_tiny")
def test_a_wrong_result_writes_nothing(tmp_path, monkeypatch):
    wrong = lambda self, i: self.eager(i) * 1.01  # noqa: E731
    monkeypatch.setattr(AttentionProblem, "fastswin", wrong)
    result = op_window_attention.run(CPU, tmp_path, ["v1_n9"], 0.005, 600.0, variants=PLAIN)
    assert result.exit_code == 1
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("cosine", [False, True])
def test_every_contender_computes_the_same(cosine):
    problem = AttentionProblem("same", 2, 6, 3, 2, cosine=cosine, dtype="fp32")
    inputs = problem.make(CPU, seed=1)
    want = problem.eager(inputs)
    for function in (problem.sdpa, problem.flex, problem.fastswin):
        torch.testing.assert_close(function(inputs), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.case)
def test_sweeps_start_with_the_default(problem):
    found = configurations(problem)
    plain = not problem.cosine
    assert found[0] == default_backward_config(problem.tokens, 32, 2, plain=plain)
    assert 10 < len(found) == len(set(found)) < 130


def test_unknown_case_and_variant(tmp_path, capsys):
    assert op_window_attention.main(["--cases", "nothing_n1"]) == 2
    assert "unknown cases" in capsys.readouterr().err
    with pytest.raises(ValueError, match="variants must be among"):
        op_window_attention.run(CPU, tmp_path, [], 0.1, 1.0, variants=["xformers"])


def test_warming_says_what_cannot_be_compiled():
    broken = AttentionProblem("broken", 1, 3, 3, 1, dtype="fp8")
    line = op_window_attention_warm._compile((broken, "compile", "cpu", False))
    assert line.startswith("broken_n9 compile: ")
    assert "compiled in" not in line
