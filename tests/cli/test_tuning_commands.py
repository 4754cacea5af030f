"""``fastswin tune``, ``warmup``, ``profile`` and ``bench startup``: output and exit codes."""

from __future__ import annotations

import json

import pytest

from fastswin.bench import startup
from fastswin.bench.profile import Profile, Row
from fastswin.bench.startup import StartupResult
from fastswin.bench.tune import TuneResult
from fastswin.bench.tune_select import Comparison
from fastswin.cli import profile as profile_command
from fastswin.cli import tune as tune_command

MODEL = "swin_tiny_patch4_window7_224"


@pytest.fixture
def tuned(monkeypatch):
    """Replaces the tuner; returns the arguments that it was called with."""
    calls = []

    def use(left=0):
        def tune_models(models, batches, precision, out, **options):
            calls.append((models, batches, precision, out, options))
            options["progress"]("mlp fp16 rows=3136: 12.5 us of 40 candidates")
            rows = [
                Comparison(MODEL, 1, 0.313, 0.290, 0.001, units=3),
                Comparison(MODEL, 64, None, None, None, "out of memory"),
            ]
            return TuneResult({}, 12, 3, left, ("mlp: slow: differs",)), rows

        monkeypatch.setattr(tune_command, "tune_models", tune_models)
        return calls

    return use


def test_tune_prints_what_it_gained(cli, tuned, tmp_path):
    calls = tuned()
    out = tmp_path / "t.json"
    done = cli(
        "tune", "--model", f"{MODEL},swin_small_patch4_window7_224", "--batches", "1,8-32",
        "--out", out, "--deadline-s", 60,
    )  # fmt: skip
    assert done.code == 0
    ((models, batches, precision, path, options),) = calls
    assert models == [MODEL, "swin_small_patch4_window7_224"]
    assert (batches, precision, path) == ([1, 8, 16, 32], "fp16", out)
    assert options["deadline_s"] == 60
    assert "1.079" in done.out  # 0.313 / 0.290
    assert "out of memory" in done.out
    assert "12 launches tuned, 3 known before, 1 candidates rejected" in done.out
    assert "12.5 us of 40 candidates" in done.err


def test_tune_json_is_alone_on_stdout(cli, tuned):
    tuned()
    done = cli("tune", "--model", MODEL, "--json")
    assert done.code == 0
    assert done.json()["tuned"] == 12
    assert done.json()["compared"][0]["tuned_ms"] == 0.290
    assert done.json()["rejected"] == ["mlp: slow: differs"]


def test_tune_says_what_a_deadline_left(cli, tuned):
    tuned(left=7)
    done = cli("tune", "--model", MODEL)
    assert done.code == 1
    assert "7 launches are left; run the same command again" in done.error_line()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "--model", MODEL, "--batches", "x"], "batches must look like 1-64 or 1,8,32"),
        (["tune", "--model", "swin_tny"], "unknown model name"),
        (["warmup", "--model", "swin_tny"], "unknown name"),
        (["profile", "--model", "swin_tny"], "unknown name"),
        (["profile", "--model", "swin_fashion_mnist", "--device", "cpu", "--method", "x"],
         "method must be one of"),
        (["bench", "startup", "--model", "swin_tny"], "unknown name"),
        (["bench", "startup", "--device", "cpu", "--variant", "onnx"], "variants must be among"),
    ],
    ids=["batches", "tune", "warmup", "profile", "method", "startup", "variant"],
)  # fmt: skip
def test_bad_input_is_one_line(cli, arguments, message, shipped):
    done = cli(*arguments)
    assert done.code == 2
    assert message in done.error_line()
    assert done.out == ""


@pytest.mark.parametrize("command", ["tune", "warmup"])
def test_what_needs_a_gpu_says_so(cli, command, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = cli(command, "--model", MODEL)
    assert done.code == 3
    assert "GPU" in done.error_line()


def test_profile_prints_rows_and_both_totals(cli, monkeypatch, shipped):
    row = Row(0, "qkv", "ops.linear", (), 2, 10.0, 20.0, 5_000_000, 2_000_000, 4.0, 40.0, 100.0)
    found = Profile(
        "swin_fashion_mnist", "fp32", 3, "cpu test", "loop", "", 0.01, 0.1, (row,), 0.02, 0.03,
        False,
    )  # fmt: skip
    seen = {}

    def profile_model(model, precision, batch, **options):
        seen.update(options, precision=precision, batch=batch)
        return found

    monkeypatch.setattr(profile_command, "profile_model", profile_model)
    arguments = ("profile", "--model", "swin_fashion_mnist", "--batch", 3, "--device", "cpu")
    done = cli(*arguments)
    assert done.code == 0
    assert (seen["precision"], seen["batch"], seen["name"]) == ("fp32", 3, "swin_fashion_mnist")
    assert "sum 0.02 ms, measured 0.03 ms" in done.out
    assert cli(*arguments, "--json").json()["rows"][0]["roofline_percent"] == 40.0


def test_profile_runs_on_a_cpu(cli, shipped):
    done = cli("profile", "--model", "swin_fashion_mnist", "--device", "cpu", "--json")
    assert done.code == 0
    layers = {row["layer"] for row in done.json()["rows"]}
    assert {"embed", "qkv", "attention", "proj", "fc1", "fc2", "norm", "pool", "head"} <= layers
    assert done.json()["measured_ms"] > 0


def test_startup_prints_parts_and_fails_where_one_failed(cli, monkeypatch, tmp_path):
    record = {
        "case": f"{MODEL}, cold cache", "dtype": "fp32", "batch": 1, "variant": "fastswin",
        "median_ms": 4500.0, "import_s": 2.0, "context_s": 1.0, "load_s": 1.0, "first_call_s": 0.5,
    }  # fmt: skip
    results = iter([(), (), ("swin compile: no compiler",)])

    def run_startup(problems, variants, **options):
        return StartupResult((record,), tmp_path / "startup.json", next(results))

    monkeypatch.setattr(startup, "run_startup", run_startup)
    done = cli("bench", "startup", "--device", "cpu")
    assert done.code == 0
    assert "4.50" in done.out
    assert cli("bench", "startup", "--device", "cpu", "--json").json()["records"] == [record]
    failed = cli("bench", "startup", "--device", "cpu")
    assert failed.code == 1
    assert "no compiler" in failed.error_line()


def test_startup_json_names_problems(cli, monkeypatch, tmp_path):
    result = StartupResult((), tmp_path / "startup.json", ("x: wrong logits",))
    monkeypatch.setattr(startup, "run_startup", lambda *_, **__: result)
    done = cli("bench", "startup", "--device", "cpu", "--json")
    assert done.code == 1
    assert json.loads(done.out) == {"records": [], "problems_found": ["x: wrong logits"]}
