"""The MLP suite on tiny problems: records only after a green check, tiles that exist."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from fastswin.bench import op_mlp, op_mlp_contenders, op_mlp_problems, op_mlp_warm, op_suite
from fastswin.bench.op_mlp_contenders import Operands, contenders
from fastswin.bench.op_mlp_problems import (
    BATCHES,
    PROBLEMS,
    SWIN_B,
    SWIN_T,
    MlpProblem,
    eager,
    has_kernel,
    stages,
)
from fastswin.bench.roofline import Ceilings
from fastswin.ops.cluster_mlp.config import ClusterMlpConfig, default_cluster_mlp_config
from fastswin.ops.mlp.config import MlpConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TINY = (MlpProblem("v1", 1, 20, 32, 1, "fp32"), MlpProblem("v2", 2, 12, 32, 2, "fp32"))
PLAIN = ("fastswin", "parts", "eager")
CLUSTERS = ClusterMlpConfig(64, 8)


@pytest.fixture
def _tiny(monkeypatch, brief_timing):
    monkeypatch.setattr(op_mlp, "PROBLEMS", TINY)
    ceilings = Ceilings(0.01, {"fp32": 0.1})
    monkeypatch.setattr(op_suite, "measure_ceilings", lambda *_: ceilings)


def run(root, names=(), deadline_s=600.0, variants=PLAIN):
    return op_mlp.run(CPU, root, names, 0.005, deadline_s, variants=variants)


@pytest.mark.usefixtures("_tiny")
def test_records_of_every_problem(tmp_path):
    assert run(tmp_path).exit_code == 0
    (path,) = tmp_path.glob("*/mlp.json")
    records = json.loads(path.read_text())["records"]
    found = {(r["case"], r["batch"], r["variant"]) for r in records}
    assert found == {(p.case, p.batch, v) for p in TINY for v in PLAIN}
    for record in records:
        assert min(record[name] for name in ("median_ms", "roofline_ms", "tflops")) > 0
        assert (record["rows"], record["channels"]) in {(20, 32), (12, 32)}
        assert ("kernel" in record) == ("max_abs_err" in record) == (record["variant"] == PLAIN[0])


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize("name", ["one_kernel", "parts"])
@pytest.mark.parametrize("fault", ["off", "unwritten", "restless", "raises"])
def test_a_wrong_result_writes_nothing(tmp_path, monkeypatch, capsys, name, fault):
    calls = []

    def wrong(o: Operands) -> torch.Tensor:
        calls.append(o)
        if fault == "raises":
            raise RuntimeError("no such kernel")
        y = eager(o.inputs)
        if fault == "off":
            return y * 1.01
        if fault == "unwritten":
            o.out[1:] = y[1:]
            return o.out
        return y.nextafter(torch.full_like(y, 9.0)) if len(calls) == 2 else y

    monkeypatch.setattr(op_mlp_contenders, name, lambda problem, device: wrong)
    result = run(tmp_path, [TINY[0].case])
    assert result.exit_code == 1
    assert "RED" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.usefixtures("_tiny")
def test_a_contender_that_cannot_be_built_leaves_the_others(tmp_path, monkeypatch, capsys):
    def broken() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(op_mlp_contenders, "compiled_eager", lambda: lambda o: broken())
    assert run(tmp_path, variants=op_mlp.VARIANTS).exit_code == 0
    assert "no compiler" in capsys.readouterr().out


@pytest.mark.usefixtures("_tiny")
def test_past_the_deadline_problems_are_named_and_not_green(tmp_path, capsys):
    assert run(tmp_path, [TINY[0].case], deadline_s=-1.0).exit_code == 1
    out = capsys.readouterr().out
    assert f"{TINY[0].case}: skipped" in out
    assert TINY[1].case not in out


@pytest.mark.usefixtures("_tiny")
def test_what_a_card_has_no_kernel_for_is_left_out_with_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(MlpProblem, "blocker", lambda self, _: "old" if self.version == 2 else None)
    result = run(tmp_path)
    assert result.exit_code == 0
    assert f"{TINY[1].case} fp32: left out: old" in capsys.readouterr().out
    assert {r["case"] for r in result.document["records"]} == {TINY[0].case}


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("version", [1, 2])
def test_every_contender_computes_the_same(version, dtype):
    problem = MlpProblem("same", 1, 33, 32, version, dtype)
    operands = Operands.make(problem, CPU, 1)
    want = eager(operands.inputs)
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    for function in contenders(problem, PLAIN, CPU).values():
        torch.testing.assert_close(function(operands), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("version", [1, 2])
def test_weights_in_clusters_are_packed_before_the_call(monkeypatch, version):
    monkeypatch.setattr(MlpProblem, "tiles", lambda *_: CLUSTERS)
    seen = []

    def launch(x, weights, eps, config, *, out, pdl):
        seen.append((weights, config, pdl))
        return out.copy_(x)

    monkeypatch.setattr(op_mlp_contenders, "packed_mlp", launch)
    problem = MlpProblem("wide", 1, 5, 256, version)
    operands = Operands.make(problem, CPU, 0)
    function = contenders(problem, ["fastswin"], CPU)["fastswin"]
    assert function(operands) is operands.out
    ((weights, config, pdl),) = seen
    assert weights is operands.packed
    assert config == CLUSTERS
    assert pdl
    assert (weights.norm is None) == (version == 1)


def test_problems_are_stages_that_one_kernel_takes():
    assert len(set(PROBLEMS)) == len(PROBLEMS)
    assert len({(p.case, p.dtype, p.batch) for p in PROBLEMS}) == len(PROBLEMS)
    assert {p.batch for p in PROBLEMS} == set(BATCHES)
    assert {p.version for p in PROBLEMS} == {1, 2}
    assert {96, 128, 192, 256, 384, 512, 768} == {p.channels for p in PROBLEMS}
    assert all(has_kernel(p.rows, p.channels) for p in PROBLEMS)
    few = {p.channels for p in stages(SWIN_T, 1, "fp16")}
    assert {p.channels for p in stages(SWIN_B, 32, "fp16")} == {128, 256}
    assert few > {p.channels for p in stages(SWIN_T, 32, "fp16")}


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.case}-{p.dtype}")
def test_a_gpu_has_tiles_for_every_problem(monkeypatch, problem):
    monkeypatch.setattr(op_mlp_problems, "device_capability", lambda _: (9, 0))
    for name in ("chosen_mlp", "chosen_streamed_mlp"):
        monkeypatch.setattr(op_mlp_problems, name, lambda *_: None)
    tiles = problem.tiles(GPU)
    if problem.channels > 256:
        assert tiles == default_cluster_mlp_config(problem.rows, problem.channels) is not None
        assert problem.launched_ahead(GPU)
    else:
        assert isinstance(tiles, MlpConfig)
        assert problem.blocker(GPU) is None


def test_only_kernels_in_clusters_may_be_missing_on_a_card(monkeypatch):
    monkeypatch.setattr(op_mlp_problems, "why_no_cluster_mlp", lambda *_: "an old card")
    wide = next(p for p in PROBLEMS if p.channels == 384)
    assert wide.blocker(GPU) == "an old card"
    assert wide.blocker(CPU) is None


def test_the_floor_is_the_larger_of_both():
    problem = MlpProblem("floor", 1, 1000, 64, 1)
    assert problem.flops == 16 * 1000 * 64**2
    assert problem.live_bytes == 2 * (2 * 1000 * 64 + 8 * 64**2)
    by_copy = problem.floor_ms(Ceilings(1e-3, {"fp16": 1e9}))
    by_products = problem.floor_ms(Ceilings(1e9, {"fp16": 1e-3}))
    assert by_copy == pytest.approx(problem.live_bytes * 1e-6)
    assert by_products == pytest.approx(problem.flops * 1e-6)


def test_unknown_names(tmp_path, capsys):
    assert op_mlp.main(["--cases", "nothing_1x1", "--device", "cpu"]) == 2
    assert "unknown cases" in capsys.readouterr().err
    with pytest.raises(ValueError, match="variants must be among"):
        op_mlp.run(CPU, tmp_path, [], 0.1, 1.0, variants=["xformers"])
    with pytest.raises(SystemExit):
        op_mlp.main(["--sweep"])


def test_warming_says_what_was_compiled_and_what_cannot_be():
    line = op_mlp_warm.compile_job((TINY[0], "parts", "cpu"))
    assert line.startswith(f"{TINY[0].case} parts: compiled in")
    broken = dataclasses.replace(TINY[0], dtype="fp8")
    line = op_mlp_warm.compile_job((broken, "fastswin", "cpu"))
    assert line.startswith(f"{broken.case} fastswin: ")
    assert "compiled in" not in line
