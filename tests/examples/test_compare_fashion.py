"""The comparison of plain and fused training judges curves, accuracy and speed."""

import json
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import compare_fashion

STEP_MS = {"plain": 30.0, "fused": 10.0}


def run(losses, accuracy):
    return {"losses": losses, "test_accuracy_percent": accuracy}


PLAIN = [run([1.0, 0.50], 90.0), run([1.1, 0.52], 90.4)]


def test_agreeing_runs():
    fused = [run([1.02, 0.51], 90.1), run([1.1, 0.52], 90.2)]
    answer = compare_fashion.judge({"plain": PLAIN, "fused": fused}, STEP_MS)
    assert answer["losses_within_spread"]
    assert answer["accuracy_agrees"]
    assert answer["accuracy_difference_points"] == pytest.approx(-0.05)
    assert answer["speed_up"] == 3.0
    assert answer["loss_distance_of_means"] == pytest.approx([0.01, 0.005])


def test_runs_of_one_seed_need_not_be_alike():
    """Fused seeds are the plain ones in another order: the same runs, so the same learning."""
    answer = compare_fashion.judge({"plain": PLAIN, "fused": PLAIN[::-1]}, STEP_MS)
    assert answer["loss_distance_of_means"] == pytest.approx([0.0, 0.0])
    assert answer["losses_within_spread"]


def test_other_losses_or_accuracy_are_seen():
    fused = [run([1.2, 0.51], 90.1), run([1.3, 0.60], 90.2)]
    assert not compare_fashion.judge({"plain": PLAIN, "fused": fused}, STEP_MS)[
        "losses_within_spread"
    ]
    fused = [run([1.0, 0.50], 89.6), run([1.1, 0.52], 90.0)]
    assert not compare_fashion.judge({"plain": PLAIN, "fused": fused}, STEP_MS)["accuracy_agrees"]


@pytest.mark.parametrize(
    ("left_s", "epochs"), [(1e4, 10), (145.0, 8), (70.0, 2), (20.0, 1)],
    ids=["capped", "fitted", "short", "none left"],
)  # fmt: skip
def test_epochs_that_fit(left_s, epochs):
    assert compare_fashion.epochs_that_fit(left_s, 10.0, 10) == epochs


#: Stands for a training run: knows its label and seed from --out, writes what train_fashion would.
CHILD = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
label, seed = out.name.split("-")
if label == "fused" and seed == sys.argv[1]:
    raise SystemExit("no card")
result = {"losses": [1.0 + 0.1 * int(seed), 0.5], "test_accuracy_percent": 90.0 + int(seed)}
(out / "training.json").write_text(json.dumps(result))
print("epochs", sys.argv[sys.argv.index("--epochs") + 1], *sys.argv)
"""


@pytest.fixture
def stand_in(monkeypatch):
    """Runs take no time; the fused run of one seed fails."""

    def install(failing):
        monkeypatch.setattr(
            compare_fashion, "command_of", lambda a: [sys.executable, "-c", CHILD, failing, *a]
        )
        monkeypatch.setattr(compare_fashion, "time_steps", lambda a: (float(len(a)), 7))

    return install


def test_runs_in_processes_of_their_own(stand_in, tmp_path, capsys):
    stand_in("none")
    arguments = ["--out", str(tmp_path), "--record", str(tmp_path / "record.json"), "--epochs", "4",
                 "--side-by-side", "4", "--limit-train", "512"]  # fmt: skip
    assert compare_fashion.main(arguments) == 0
    log = (tmp_path / "fused-2" / "log.txt").read_text()
    for words in ("epochs 4", "--accelerate auto --capture", "--seed 2", "--limit-train 512"):
        assert words in log
    assert "--accelerate reference" in (tmp_path / "plain-0" / "log.txt").read_text()
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["seeds"] == 3
    assert record["losses"]["fused"][1] == [1.1, 0.5]
    assert record["epochs"] == 4
    assert {"suite", "created", "commit", "gpu", "torch", "recipe", "speed_up"} <= record.keys()
    assert "speed-up" in capsys.readouterr().out


def test_a_missing_run_is_no_yes(stand_in, tmp_path, capsys):
    stand_in("1")
    assert compare_fashion.main(["--out", str(tmp_path), "--side-by-side", "6"]) == 1
    assert "fused-1: no card" in capsys.readouterr().out
    assert json.loads((tmp_path / "comparison.json").read_text())["seeds"] == 2
    assert compare_fashion.main(["--out", str(tmp_path), "--limit-s", "0"]) == 1
    assert "not judged" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        compare_fashion.main(["--seeds", "1"])


def test_slow_runs_are_stopped(tmp_path):
    said = []
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    runs = [(tmp_path / name, sleeper) for name in ("a", "b")]
    began = time.monotonic()
    compare_fashion.train_all(runs, 1, began + 0.3, said.append)
    assert time.monotonic() - began < 20
    assert said == ["a: stopped", "b: not started"]
