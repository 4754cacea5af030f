"""The sweep over exports: a record a batch, faults kept out of it; tables of both kinds."""

import json

import pytest

from fastswin.bench import export_sweep, suites
from fastswin.bench.export_sweep import Case, default_cases, main, run_sweep
from fastswin.bench.export_tables import make_engine_table, make_export_table
from fastswin.bench.report import markdown_for
from fastswin.bench.roofline import Ceilings
from fastswin.export.report import ParityError


@pytest.fixture(autouse=True)
def _ceilings(monkeypatch):
    monkeypatch.setattr(suites, "measure_ceilings", lambda *_: Ceilings(0.01, {"fp32": 0.05}))


def test_records_differences_and_nodes_of_both_exports(tiny_problem, tmp_path):
    config = tiny_problem.config.replace(depths=(2,), num_heads=(2,))
    lines = []
    case = Case("tiny", config, ("newest",))
    assert run_sweep([case], batches=(1, 3), out=tmp_path, say=lines.append) == []
    (path,) = tmp_path.glob("*/export.json")
    records = json.loads(path.read_text())["records"]
    assert [record["batch"] for record in records] == [1, 3]
    for record in records:
        assert record["variant"] == f"standard-opset{record['opset']}"
        assert 0 < record["max_abs_err"] <= record["bound"] == 1e-4
        assert record["max_abs_err_unfolded"] <= 1e-4
        assert record["max_abs_logit"] > 1  # perturbed weights, or the bound would mean little
        assert 0 < record["nodes"] < record["plain_nodes"]
    assert f"{records[0]['nodes']} nodes" in lines[0]
    table = make_export_table(json.loads(path.read_text()))
    assert table.header[-2:] == ("b1", "b3")
    assert [row[0] for row in table.rows] == ["tiny"]
    cells = f"| {records[0]['nodes']} | {records[0]['plain_nodes']} |"
    assert cells in markdown_for("export", tmp_path)


def test_a_wrong_export_is_a_fault_and_no_record(tiny_problem, tmp_path, monkeypatch):
    def wrong(*arguments, **keywords):
        raise ParityError("the exported graph's logits differ")

    monkeypatch.setattr(export_sweep, "export_onnx", wrong)
    monkeypatch.setattr(export_sweep, "plain_node_count", lambda *_: None)
    (fault,) = run_sweep([Case("tiny", tiny_problem.config)], out=tmp_path, say=lambda line: None)
    assert fault == "tiny plain: the exported graph's logits differ"
    (path,) = tmp_path.glob("*/export.json")
    assert json.loads(path.read_text())["records"] == []


def test_a_passed_deadline_is_a_fault(tiny_problem, tmp_path):
    (fault,) = run_sweep([Case("tiny", tiny_problem.config)], out=tmp_path, deadline_s=-1)
    assert "tiny: skipped, the deadline of -1 s passed" in fault


def test_cases_are_ordered_by_size_and_named_ones_get_every_form():
    cases = default_cases(
        ["swin_large_patch4_window12_384", "swin_base_patch4_window7_224",
         "swin_tiny_patch4_window7_224"]
    )  # fmt: skip
    assert [case.name.split("_")[1] for case in cases] == ["tiny", "base", "large"]
    assert [case.forms for case in cases] == [("plain", "newest"), ("plain",), ("plain",)]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--models", "swin_tyni"], "--models"), (["--batches", "1,0"], "--batches")],
    ids=["models", "batches"],
)
def test_bad_arguments_are_named_and_nothing_is_written(arguments, word, tmp_path, capsys):
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert word in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_engines_stand_in_order_of_model_precision_and_target():
    common = {
        "batch": 8, "variant": "v", "torch": "2.11.0", "commit": "0" * 40, "runtime": "rtx 1.2",
        "engine_bytes": 2**20, "network_layers": {"gather": 3, "softmax": 2}, "build_s": 1.25,
        "engine_layers": {"gemm": 4},
    }  # fmt: skip
    rows = [
        ("swinv2_tiny_window8_256", "fp32", [86], True),
        ("swin_tiny_patch4_window7_224", "int8", [86, 89], False),
        ("swin_tiny_patch4_window7_224", "int8", [86], True),
        ("swin_tiny_patch4_window7_224", "fp32", [89], True),
    ]
    records = [
        common | {"case": case, "dtype": dtype, "capabilities": cards, "folded": folded}
        for case, dtype, cards, folded in rows
    ]
    table = make_engine_table({"gpu": "cpu x", "created": "now", "records": records})
    assert [row[:4] for row in table.rows] == [
        ("swin_tiny_patch4_window7_224", "fp32", "sm_89", "folded"),
        ("swin_tiny_patch4_window7_224", "int8", "sm_86", "folded"),
        ("swin_tiny_patch4_window7_224", "int8", "sm_86 sm_89", "unfolded"),
        ("swinv2_tiny_window8_256", "fp32", "sm_86", "folded"),
    ]
    assert table.rows[0][4:] == ("1.0", "5", "4", "1.2")
    assert "0000000000" in table.caption
