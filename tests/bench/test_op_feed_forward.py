"""The feed-forward benchmark on tiny shapes in the interpreter: green, red, and its candidates."""

from __future__ import annotations

import json

import pytest
import torch

from fastswin.bench import op_feed_forward as bench
from fastswin.bench import op_feed_forward_check as check
from fastswin.bench import op_feed_forward_timing as timing
from fastswin.bench.op_feed_forward_problems import (
    PROBLEMS,
    FeedForwardProblem,
    backward_candidates,
    forward_candidates,
    pairs,
)
from fastswin.ops.feed_forward.config import EpilogueConfig, FeedForwardConfig, FusedConfig

TINY = FeedForwardProblem("tiny", 18, 32)
FUSED = FusedConfig(16, 64, 4, 1)


@pytest.fixture
def one_configuration(monkeypatch):
    monkeypatch.setattr(timing, "ROUNDS", 1)
    for direction in timing.CANDIDATES:
        monkeypatch.setitem(timing.CANDIDATES, direction, lambda problem: [FUSED])


def test_right_configurations_are_timed(one_configuration, tmp_path):
    code = bench.run([TINY], torch.device("cpu"), torch.float16, tmp_path, 1, 300.0)
    records = json.loads((tmp_path / "op_feed_forward.json").read_text())
    both = [r["contender"] for r in records if r.get("direction") == "both"]
    assert code == 0
    assert both == ["library", "fused", "eager"]
    assert all(r["median_ms"] > 0 for r in records)
    assert "tiny" in (tmp_path / "op_feed_forward.txt").read_text()


def test_wrong_configurations_have_no_time(one_configuration, monkeypatch, tmp_path):
    right = check.both
    monkeypatch.setattr(check, "both", lambda o, c: (right(o, c)[0] + 1, *right(o, c)[1:]))
    log = timing.Log(tmp_path)
    timer = timing.ProblemTimer(TINY, torch.device("cpu"), torch.float16, log)
    assert timer.time_direction("forward", [None]) == {}
    assert log.records[0]["red"].startswith("y: max error")
    assert "median_ms" not in log.records[0]


def test_a_deadline_that_is_over_skips(tmp_path):
    code = bench.run([TINY], torch.device("cpu"), torch.float16, tmp_path, 1, -1.0)
    assert code == 1
    assert "skipped" in (tmp_path / "op_feed_forward.txt").read_text()


def test_candidates_of_every_stage():
    assert [p.rows for p in PROBLEMS[:4]] == [401408, 100352, 25088, 6272]
    for problem in PROBLEMS:
        forward, backward = forward_candidates(problem), backward_candidates(problem)
        fused = [c for c in backward if isinstance(c, FusedConfig)]
        assert bool(fused) == (problem.channels <= 192)
        assert all(isinstance(c, EpilogueConfig) for c in backward if c not in fused)
        tried = pairs(forward, backward)
        assert {c.forward for c in tried} == set(forward)
        assert {c.backward for c in tried} == set(backward)
        assert all(isinstance(c, FeedForwardConfig) for c in tried)


def test_unknown_cases_are_refused(capsys, tmp_path):
    assert bench.main(["--out", str(tmp_path / "new"), "--cases", "huge"]) == 2
    assert "stage 1" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
