"""The demonstration on a small stand-in model: report, picture, gates, time limits."""

import functools
import json

import pytest
import torch
from PIL import Image

from fastswin.demo import figure as figure_module
from fastswin.demo import latency as latency_module
from fastswin.demo import run as run_module
from fastswin.demo.latency import measure_latency, red_rows
from fastswin.engine import Engine


@pytest.fixture
def small_contest(monkeypatch, shipped, brief_timing):
    """Only the stand-in model is timed, briefly and without the compiler."""
    monkeypatch.setattr(latency_module, "COMPILE_S", float("inf"))
    monkeypatch.setattr(latency_module, "LARGE_MODEL_S", float("inf"))
    brief = functools.partial(latency_module.run_model_suite, seconds_per_contender=0.05)
    monkeypatch.setattr(latency_module, "run_model_suite", brief)


def test_demo_report(cli, small_contest, tmp_path):
    out = tmp_path / "demo"
    done = cli("demo", "--out", out, "--device", "cpu", "--limit", 100)
    assert done.code == 0, done.err
    report = json.loads((out / "report.json").read_text())
    assert len(report["predictions"]) == run_module.SHOWN_IMAGES
    for row in report["predictions"]:
        assert row["right"] == (row["predicted"] == row["label"])
        assert 0.1 <= row["probability"] <= 1.0
    assert report["parity"]["fp32"]["images"] == 100
    assert report["parity"]["fp32"]["agreement_percent"] == 100.0
    assert report["failures"] == []
    timed = {r["variant"]: r["status"] for r in report["latency"] if "fashion" in r["case"]}
    assert timed == {"fastswin": "ok", "eager": "ok", "jit-trace": "ok", "compile": "skipped"}
    with Image.open(out / "report.png") as picture:
        assert picture.size[0] > 800
    for word in ("Ankle boot", "fp32", "jit-trace", "agreement", "no time left"):
        assert word in done.out


def test_demo_json(cli, shipped, tmp_path):
    done = cli(
        "demo", "--out", tmp_path, "--device", "cpu", "--limit", 50, "--no-latency", "--json"
    )
    assert done.code == 0
    assert done.json() == json.loads((tmp_path / "report.json").read_text())


def test_red_parity_is_exit_code_1_with_a_report(cli, shipped, tmp_path, monkeypatch):
    original = Engine.__call__
    monkeypatch.setattr(Engine, "__call__", lambda self, images: original(self, images).flip(1))
    done = cli("demo", "--out", tmp_path, "--device", "cpu", "--limit", 50, "--no-latency")
    assert done.code == 1
    assert "check failed" in done.err
    assert json.loads((tmp_path / "report.json").read_text())["failures"]


def test_without_matplotlib_the_report_says_so(cli, shipped, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "why_no_figure", lambda: "matplotlib is not installed")
    done = cli("demo", "--out", tmp_path, "--device", "cpu", "--limit", 50, "--no-latency")
    assert done.code == 0
    assert "matplotlib is not installed" in done.out
    assert not (tmp_path / "report.png").exists()


def test_a_crash_while_drawing_leaves_no_picture(cli, shipped, tmp_path, monkeypatch):
    def crash(*_):
        raise KeyError("drawing")

    monkeypatch.setattr(figure_module, "_title", crash)
    done = cli("demo", "--out", tmp_path, "--device", "cpu", "--limit", 50, "--no-latency")
    assert done.code == 4
    assert list(tmp_path.iterdir()) == []


def test_comparison_stops_when_time_is_up(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 5.0])
    monkeypatch.setattr(run_module.time, "monotonic", lambda: next(clock))
    assert list(run_module._until(iter("abcd"), 2.0)) == ["a", "b"]


@pytest.mark.parametrize(
    ("deadline_s", "compiled", "large"),
    [(0.0, False, False), (45.0, False, True), (None, True, True)],
)
def test_dear_parts_need_time(shipped, tmp_path, monkeypatch, deadline_s, compiled, large):
    ran = []

    def record(problems, variants, *_):
        ran.append((problems[0].model, tuple(variants)))
        return []

    monkeypatch.setattr(latency_module, "_run", record)
    rows = measure_latency(
        "swin_fashion_mnist", torch.device("cpu"), tmp_path, deadline_s=deadline_s, say=print
    )
    assert [("compile" in variants) for _, variants in ran] == [compiled] + [False] * large
    assert {row["status"] for row in rows} <= {"skipped"}
    assert (latency_module.LARGE_MODEL in {row["case"] for row in rows}) == (not large)
    assert red_rows(rows) == []


def test_red_rows_are_ours_only():
    row = {"case": "m", "dtype": "fp32", "batch": 1, "message": "too far off"}
    rows = [
        row | {"variant": "fastswin", "status": "red"},
        row | {"variant": "compile", "status": "failed"},
        row | {"variant": "fastswin", "status": "skipped"},
        row | {"variant": "fastswin", "status": "ok"},
    ]
    assert red_rows(rows) == ["latency of m fp32 batch 1: too far off"]
