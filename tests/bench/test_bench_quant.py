"""Quantised precisions beside half precision, and half blocks, on a tiny model."""

import dataclasses
import json
import math
import multiprocessing
from types import SimpleNamespace

import pytest
import torch

from fastswin.bench import quant, quant_halves
from fastswin.bench.problems import PRECISIONS, Problem
from fastswin.bench.quant import run_quant_suite
from fastswin.bench.quant_entries import Entry, make_entries
from fastswin.bench.quant_forms import HALVES
from fastswin.bench.quant_parallel import Shared, _messages, _Worker, run_side_by_side
from fastswin.bench.roofline import Ceilings
from fastswin.engine.quantized.formats import BlockFormats, LayerFormat
from fastswin.engine.quantized.forward import QuantizedForward
from fastswin.quant import SpeedTable

CEILINGS = Ceilings(0.01, dict.fromkeys(PRECISIONS, 0.02))
CPU = torch.device("cpu")


@pytest.fixture
def problem(tiny_problem):
    config = dataclasses.replace(tiny_problem.config, depths=(1, 1))
    return Problem("tiny", "fp32", 2, config)


def run(problems, entries, out, **options):
    entries = [Entry.parse(text) for text in entries.split(",")]
    options = {"seconds": 0.02, "ceilings": CEILINGS, **options}
    return run_quant_suite(problems, entries, "cpu", out, **options)


def test_records_hold_ratios_over_the_first(problem, tmp_path):
    result = run([problem], "fp32,fp8,fp32:eager,fp8:eager", tmp_path)
    records = {(r["dtype"], r["variant"]): r for r in result.document["records"]}
    assert set(records) == {("fp32", "fastswin"), ("fp8", "fastswin"), ("fp32", "eager")}
    base = records["fp32", "fastswin"]
    for record in records.values():
        ratio = base["median_ms"] / record["median_ms"]
        assert record["over_fp32"] == pytest.approx(ratio, rel=1e-3)
    quantized = records["fp8", "fastswin"]
    assert quantized["quantized_layers"] == "9/9"
    assert 0 < quantized["rel_rms_err"] <= quantized["gate_rel_rms"]
    assert result.exit_code == 1
    assert result.problems_found == [
        "tiny fp8 batch 2 eager: unavailable: PyTorch has no fp8 form of this model"
    ]
    assert result.path.name == "quant.json"
    assert json.loads(result.path.read_text())["records"] == result.document["records"]


def test_wrong_answers_print_no_speed(problem, tmp_path, monkeypatch):
    monkeypatch.setattr(QuantizedForward, "mlp_half", lambda *arguments: None)
    lines = []
    result = run([problem], "fp32,fp8", tmp_path, progress=lines.append)
    assert [r["dtype"] for r in result.document["records"]] == ["fp32"]
    assert "over the gate" in result.problems_found[0]
    assert not [line for line in lines if "fp8 batch 2 fastswin:" in line and " ms" in line]


def test_a_deadline_skips_the_rest(problem, tmp_path):
    result = run([problem], "fp32,fp8", tmp_path, deadline_s=0.0)
    assert {outcome.status for outcome in result.outcomes} == {"skipped"}
    assert result.exit_code == 1


def test_side_by_side_and_resumed(problem, tmp_path):
    """One problem that is measured and one that cannot be built; then only what is missing."""
    broken = dataclasses.replace(problem, batch=3, checkpoint=str(tmp_path / "missing.pt"))
    lines = []
    options = {"processes": 2, "deadline_s": 200.0, "progress": lines.append}
    result = run([problem, broken], "fp32,fp32:eager", tmp_path, **options)
    found = {(r["batch"], r["variant"]) for r in json.loads(result.path.read_text())["records"]}
    assert found == {(2, "fastswin"), (2, "eager")}
    assert {o.status for o in result.outcomes if o.problem.batch == 3} == {"failed"}
    assert sum(line.endswith(": built") for line in lines) == 1
    again = run([problem], "fp32,fp32:eager", tmp_path, resume=True)
    assert again.outcomes == ()
    more = run([problem], "fp32,int8", tmp_path, resume=True, deadline_s=0.0)
    assert {o.status for o in more.outcomes} == {"skipped"}


def test_what_processes_cannot_do_is_said(problem):
    here, there = multiprocessing.Pipe()
    there.close()
    gone = _Worker(problem, None, here)
    assert _messages([gone], math.inf) == [(gone, "its process died")]
    shared = Shared((), CPU, CEILINGS, None, 0.02)
    late = run_side_by_side([problem], shared, 1, build_s=1.0, deadline=0.0)
    assert list(late) == [(problem, "the deadline passed before it was built")]
    with pytest.raises(ValueError, match="processes must be at least 1, got 0"):
        list(run_side_by_side([problem], shared, 0, build_s=1.0, deadline=0.0))


def test_entries():
    assert Entry.parse(" int8 ") == Entry("int8", "fastswin")
    assert str(Entry.parse("fp16:compile")) == "fp16 compile"
    with pytest.raises(ValueError, match=r"contenders must be PRECISION.* got 'int4'"):
        Entry.parse("int4")
    entries = make_entries(["fp8"], ["eager", "fastswin-scheme"], CPU)
    assert list(map(str, entries)) == [
        "fp32 fastswin", "fp8 fastswin", "fp32 eager", "fp8 fastswin-scheme",
    ]  # fmt: skip


@pytest.mark.parametrize("arguments", [["--models", "swin"], ["--batches", "0"],
                                       ["--contenders", "int9"]])  # fmt: skip
def test_wrong_arguments(arguments, capsys):
    assert quant.main([*arguments, "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("fastswin: ")


def test_forms_of_halves():
    """The library has neither an MLP in one kernel nor a wide output behind q, k and v's steps."""
    eight = LayerFormat("fp8", "triton")
    block = BlockFormats(eight, "fp8", eight, eight, eight)
    forms = SimpleNamespace(qkv=None, proj=None, fc1=None, fc2=None)
    attention, mlp = HALVES["attention"], HALVES["mlp"]
    made = attention["qkv, wide attention"].block(block, forms, fits=True)
    assert (made.qkv.format, made.attention, made.proj.format) == ("fp8", "wide", "wide")
    assert attention["qkv+proj"].block(block, forms, fits=True).attention == "fp8"
    assert mlp["one kernel"].block(block, forms, fits=True).mlp == "fused"
    assert mlp["one kernel"].block(block, forms, fits=False).mlp == "split"
    by_library = {n: list(f.in_library()) for h in HALVES.values() for n, f in h.items()}
    assert {name: found for name, found in by_library.items() if found} == {
        "qkv": ["library"], "reduction": ["library"],
        "qkv+proj": ["qkv in library", "proj in library", "library"],
        "fc1+fc2": ["fc1 in library", "fc2 in library", "library"],
    }  # fmt: skip


def test_halves_make_a_speed_table(problem, tmp_path, capsys):
    own = dataclasses.replace(problem, dtype="fp8")
    assert quant_halves.run([own], CPU, tmp_path, 0.01, 60.0) == 0
    (folder,) = tmp_path.iterdir()
    rows = json.loads((folder / "quant_halves.json").read_text())
    assert [(row["stage"], row["half"]) for row in rows] == [
        (0, "attention"), (0, "mlp"), (0, "merge"), (1, "attention"), (1, "mlp"),
    ]  # fmt: skip
    assert all(us > 0 for row in rows for us in row["latency_us"].values())
    table = SpeedTable.load(folder / "speed-tiny-fp8-b2.json")
    assert len(table.layers) == 9
    times = rows[0]["latency_us"]
    qkv = table.layers["layers.0.blocks.0.attn.qkv"]
    fastest = min(times["qkv"], times["qkv, wide attention"])
    assert qkv == pytest.approx((times["wide"], fastest))
    assert "stage 1" in capsys.readouterr().out
    assert quant_halves.run([own], CPU, tmp_path, 0.01, 0.0) == 1
