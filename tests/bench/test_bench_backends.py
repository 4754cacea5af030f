"""``--backends``: runtimes as contenders, each with its difference; what is absent says so."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from fastswin.bench import backend_accuracy, runtimes
from fastswin.bench.backends import BACKENDS, backend_variants, make_backend_table
from fastswin.bench.contenders import DEFAULT_VARIANTS, VARIANTS, build_contender
from fastswin.bench.failures import UnavailableError
from fastswin.bench.problems import Problem, seeded_images
from fastswin.bench.report import markdown_for
from fastswin.bench.roofline import Ceilings
from fastswin.bench.source import build_source
from fastswin.engine import Engine

CPU = torch.device("cpu")

#: An export by torch takes seconds, so each of its forms is here once.
RUNTIMES = ("openvino", "onnxruntime", "onnxruntime-unfolded")
OURS = ("fastswin-onnx", "fastswin-openvino", "fastswin-onnxruntime")


@pytest.fixture
def real_engine(engine, monkeypatch):
    monkeypatch.setattr("fastswin.engine.Engine", Engine)


def test_folded_and_unfolded_rows_agree_with_eager(run_suite, real_engine, tiny_problem):
    config = tiny_problem.config.replace(depths=(2,), num_heads=(2,))
    problem = Problem("tiny", "fp32", 2, config)
    result = run_suite([problem], (*RUNTIMES, *OURS, "fastswin", "eager"))
    assert result.problems_found == []
    records = {r["variant"]: r for r in result.document["records"]}
    assert all(r["max_abs_err"] <= 1e-4 for r in records.values())
    assert records["fastswin-onnxruntime"]["backend"] == "onnxruntime"
    assert records["fastswin"]["backend"] == "openvino"
    assert records["openvino"]["runtime"].startswith("OpenVINO")
    table = make_backend_table(result.document)
    folded = {row[1]: set() for row in table.rows}
    for row in table.rows:
        folded[row[1]].add(row[2])
    assert folded["torch.onnx.export in ONNX Runtime"] == {"yes", "no"}
    assert folded["fastswin export onnx in ONNX Runtime"] == {"yes"}
    assert folded["PyTorch"] == {"-"}
    speed = {row[1]: row[7] for row in table.rows}
    assert speed["PyTorch"] == "1.00x"
    assert all(float(row[8]) <= 1e-4 for row in table.rows)


def test_int8_is_checked_against_the_integer_reference(run_suite, real_engine, tiny_problem):
    problem = Problem("tiny", "int8", 2, tiny_problem.config)
    result = run_suite([problem], ("fastswin", "fastswin-onnxruntime", "eager"), forgiving=True)
    assert result.problems_found == []
    records = {r["variant"]: r for r in result.document["records"]}
    assert set(records) == {"fastswin", "fastswin-onnxruntime"}
    assert all(0 < r["max_abs_err"] <= r["gate_max_abs"] for r in records.values())
    assert records["fastswin"]["compute"] == "int8"


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
def test_a_precision_that_a_runtime_lacks_is_unavailable(dtype, tiny_problem):
    problem = Problem("tiny", dtype, 1, tiny_problem.config)
    images = seeded_images(problem, 1, CPU, 0)
    with pytest.raises(UnavailableError, match=f"not {dtype}"):
        build_contender("onnxruntime", build_source(problem), problem, images)


def test_tensorrt_needs_a_gpu(tiny_problem):
    images = seeded_images(tiny_problem, 2, CPU, 0)
    with pytest.raises(UnavailableError, match="TensorRT needs a GPU"):
        build_contender("tensorrt", build_source(tiny_problem), tiny_problem, images)


def test_a_missing_runtime_names_its_extra(tiny_problem):
    with pytest.raises(UnavailableError, match=r"no_such_runtime is not .*'fastswin\[openvino\]'"):
        runtimes._load("no_such_runtime", "openvino")


def test_named_variants_are_forgiven_only_where_asked(run_suite, tiny_problem):
    assert run_suite([tiny_problem], ("eager", "tensorrt")).exit_code == 1
    assert run_suite([tiny_problem], ("eager", "tensorrt"), forgiving=True).exit_code == 0


def test_backends_stand_for_variants():
    assert backend_variants(["torch", "openvino"]) == ["eager", "openvino", "openvino-unfolded"]
    assert set(backend_variants(list(BACKENDS))) <= set(VARIANTS)
    assert set(DEFAULT_VARIANTS) <= set(VARIANTS)
    with pytest.raises(ValueError, match=r"--backends must be among torch, .* got 'tflite'"):
        backend_variants(["tflite"])


def test_tensorrt_that_is_not_installed_says_what_is(tiny_problem, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    images = SimpleNamespace(is_cuda=True)  # as far as the builder looks before it needs a GPU
    with pytest.raises(UnavailableError, match=r"pip install tensorrt$"):
        runtimes.tensorrt_builder(folded=True)(build_source(tiny_problem), tiny_problem, images)


def test_accuracy_of_the_shipped_model_by_runtime(tmp_path, capsys, monkeypatch):
    ceilings = Ceilings(0.01, {"fp32": 0.05})
    monkeypatch.setattr("fastswin.bench.suites.measure_ceilings", lambda *_: ceilings)
    arguments = ["--precisions", "fp32", "--limit", "48", "--out", str(tmp_path)]
    assert backend_accuracy.main(arguments) == 0
    assert "fastswin-openvino" in capsys.readouterr().out
    (path,) = tmp_path.glob("*/backend_accuracy.json")
    records = json.loads(path.read_text())["records"]
    assert {r["variant"]: r["agreement_percent"] for r in records} == {
        "reference": 100.0, "fastswin-onnxruntime": 100.0, "fastswin-openvino": 100.0,
    }  # fmt: skip
    assert max(record["max_abs_err"] for record in records) <= 1e-4
    assert "| onnxruntime | fp32 | fp32 | " in markdown_for("backend_accuracy", tmp_path)
    assert backend_accuracy.main(["--precisions", "int4", "--out", str(tmp_path)]) == 2
    assert "--precisions" in capsys.readouterr().err
