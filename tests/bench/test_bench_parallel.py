"""Waves of processes: all records arrive, a dead worker costs only its own problem."""

from __future__ import annotations

import json
import multiprocessing

import pytest

from fastswin.bench.parallel import run_parallel
from fastswin.bench.problems import Problem
from fastswin.models import SwinConfig

TINY = SwinConfig(
    image_size=(32, 32), embed_dim=16, depths=(1, 1), num_heads=(1, 2), window_size=(4, 4),
    num_classes=10,
)  # fmt: skip


def test_wave_writes_every_problem(tmp_path):
    problems = [Problem("tiny", "fp32", batch, TINY) for batch in (1, 2)]
    lines: list[str] = []
    wrong = run_parallel(
        problems, 2, ["fastswin", "eager"], device="cpu", out=tmp_path,
        seconds_per_contender=0.05, progress=lines.append,
    )  # fmt: skip
    assert wrong == []
    (path,) = tmp_path.rglob("*.json")
    document = json.loads(path.read_text())
    found = {(r["batch"], r["variant"]) for r in document["records"]}
    assert found == {(b, v) for b in (1, 2) for v in ("fastswin", "eager")}
    assert all(r["copy_tbs"] == document["copy_tbs"] for r in document["records"])
    assert document["copy_tbs"] != 1.0  # the placeholder that workers start with
    assert sum("built" in line for line in lines) == 2


def test_worker_that_fails_is_reported_and_the_rest_goes_on(tmp_path):
    problems = [
        Problem("tiny", "tf32", 1, TINY),  # no TF32 on a CPU
        Problem("tiny", "fp32", 1, TINY),
    ]
    wrong = run_parallel(
        problems, 2, ["eager"], device="cpu", out=tmp_path, seconds_per_contender=0.05
    )
    assert len(wrong) == 1
    assert "tf32" in wrong[0]
    (path,) = tmp_path.rglob("*.json")
    assert [r["dtype"] for r in json.loads(path.read_text())["records"]] == ["fp32"]


def test_a_worker_that_is_late_is_ended_before_the_others_are_timed(tmp_path):
    """It would take their cores; children were left to compile until their wave had been timed."""
    children: list[int] = []
    wrong = run_parallel(
        [Problem("tiny", "fp32", 1, TINY)], 1, ["eager"], device="cpu", out=tmp_path,
        build_s=0.05, start_timing=lambda: children.append(len(multiprocessing.active_children())),
    )  # fmt: skip
    assert wrong == ["tiny fp32 batch 1: not built within 0.05 s"]
    assert children == [0]


def test_what_a_worker_died_of_is_reported(tmp_path):
    problem = Problem("tiny", "fp32", 1, TINY)
    wrong = run_parallel([problem], 1, ["eager", "nonsense"], device="cpu", out=tmp_path)
    assert len(wrong) == 1
    assert wrong[0].startswith(f"{problem}: ")
    assert "nonsense" in wrong[0]
    assert list(tmp_path.rglob("*.json")) == []


def test_processes_must_be_positive():
    with pytest.raises(ValueError, match="processes"):
        run_parallel([], 0)
