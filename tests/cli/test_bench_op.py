"""``fastswin bench op softmax`` and ``mlp``: records, JSON alone on stdout, exit codes."""

from __future__ import annotations

import json

import pytest

from fastswin.bench import op_mlp, op_mlp_contenders, op_softmax, op_suite
from fastswin.bench.op_mlp_problems import MlpProblem, eager
from fastswin.bench.op_softmax_problems import SoftmaxProblem
from fastswin.bench.roofline import Ceilings

TINY = [SoftmaxProblem("window", (4, 2, 9, 9), "fp32", windows=2)]


@pytest.fixture
def tiny_problems(monkeypatch, brief_timing):
    monkeypatch.setattr(op_softmax, "PROBLEMS", TINY)
    monkeypatch.setattr(op_suite, "measure_ceilings", lambda *_: Ceilings(0.01, {"fp32": 0.1}))
    monkeypatch.setattr(op_softmax, "_compiled", lambda f: lambda i: f(i.x, i.bias, i.mask, i.lens))
    return TINY[0].case


def test_json_is_alone_on_stdout(cli, tiny_problems, tmp_path):
    code, out, _ = cli(
        "bench", "op", "softmax", "--device", "cpu", "--seconds", "0.01", "--out", str(tmp_path),
        "--json",
    )  # fmt: skip
    assert code == 0
    document = json.loads(out)
    assert {r["case"] for r in document["records"]} == {tiny_problems}
    assert {r["direction"] for r in document["records"]} == {"forward", "backward"}
    assert len(list(tmp_path.rglob("softmax.json"))) == 1


@pytest.mark.usefixtures("tiny_problems")
def test_mlps_have_every_variant(cli, monkeypatch, tmp_path):
    monkeypatch.setattr(op_mlp, "PROBLEMS", [MlpProblem("half", 1, 9, 32, 1, "fp32")])
    monkeypatch.setattr(op_mlp_contenders, "compiled_eager", lambda: lambda o: eager(o.inputs))
    code, out, _ = cli(
        "bench", "op", "mlp", "--device", "cpu", "--seconds", "0.01", "--out", str(tmp_path),
        "--json",
    )  # fmt: skip
    assert code == 0
    assert {r["variant"] for r in json.loads(out)["records"]} == set(op_mlp.VARIANTS)


def test_deadline_is_not_green(cli, tiny_problems, tmp_path):
    code, out, _ = cli(
        "bench", "op", "softmax", "--device", "cpu", "--deadline", "-1", "--out", str(tmp_path)
    )
    assert code == 1
    assert "skipped" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["sofmax"], "softmax"), (["softmax", "--case", "nothing"], "unknown cases")],
    ids=["operator", "case"],
)
def test_bad_names_are_listed_before_anything_runs(cli, arguments, message, tmp_path):
    code, out, err = cli("bench", "op", *arguments, "--device", "cpu", "--out", str(tmp_path))
    assert code == 2
    assert message in err
    assert out == ""
    assert not list(tmp_path.iterdir())
