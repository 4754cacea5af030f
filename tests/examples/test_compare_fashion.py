"""The comparison of plain and fused training judges curves, accuracy and speed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import compare_fashion


def run(losses, accuracy, seconds):
    return {"losses": losses, "test_accuracy_percent": accuracy, "seconds": seconds}


PLAIN = [run([1.0, 0.50], 90.0, 20), run([1.1, 0.52], 90.4, 20)]


def test_agreeing_runs():
    fused = [run([1.02, 0.51], 90.1, 10), run([1.1, 0.52], 90.2, 10)]
    answer = compare_fashion.judge({"plain": PLAIN, "fused": fused})
    assert answer["losses_within_spread"]
    assert answer["accuracy_agrees"]
    assert answer["accuracy_difference_points"] == pytest.approx(-0.05)
    assert answer["speed_up"] == 2.0
    assert answer["loss_distance_fused_from_plain"] == pytest.approx([0.02, 0.01])


def test_other_losses_or_accuracy_are_seen():
    fused = [run([1.3, 0.51], 90.1, 10), run([1.1, 0.70], 90.2, 10)]
    assert not compare_fashion.judge({"plain": PLAIN, "fused": fused})["losses_within_spread"]
    fused = [run([1.0, 0.50], 89.6, 10), run([1.1, 0.52], 90.0, 10)]
    assert not compare_fashion.judge({"plain": PLAIN, "fused": fused})["accuracy_agrees"]


def test_one_seed_has_no_spread(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        compare_fashion.train_fashion, "main", lambda a: asked.append(a) or PLAIN[0]
    )
    assert compare_fashion.main(["--out", str(tmp_path), "--seeds", "1"]) == 1
    assert [a[a.index("--accelerate") + 1] for a in asked] == ["reference", "auto"]
    assert compare_fashion.main(["--out", str(tmp_path), "--limit-s", "-1"]) == 1
    assert compare_fashion.main(["--out", str(tmp_path), "--seeds", "2"]) == 0
    assert (tmp_path / "comparison.json").exists()
