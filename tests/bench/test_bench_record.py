"""The record file: format, merging, atomicity, and the commit it is stamped with."""

import json
import os
import subprocess

import pytest

from fastswin.bench.record import (
    RunInfo,
    card_slug,
    current_commit,
    load_document,
    record_key,
    result_path,
    save_records,
    stamp,
)

OLD = RunInfo("model", "2026-11-01T00:00:00Z", "aaa", "NVIDIA H100 80GB HBM3", "2.11.0", "3.6.0",
              3.02, 700.0)  # fmt: skip
NEW = RunInfo("model", "2026-11-02T00:00:00Z", "bbb", "NVIDIA H100 80GB HBM3", "2.14.1", "3.8.0",
              2.9, 650.0)  # fmt: skip


def record(variant, median_ms, info, batch=1, dtype="fp16"):
    values = {"case": "swin", "dtype": dtype, "batch": batch, "variant": variant}
    return stamp(info, {**values, "median_ms": median_ms})


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("cpu AMD EPYC 7B13 @ 2.2GHz", "cpu-amd-epyc-7b13-2-2ghz"),
    ],
)
def test_card_folder(name, slug, tmp_path):
    assert card_slug(name) == slug
    assert result_path(tmp_path, OLD) == tmp_path / "nvidia-h100-80gb-hbm3" / "model.json"


def test_file_has_the_fixed_fields(tmp_path):
    path = tmp_path / "model.json"
    save_records(path, OLD, [record("fastswin", 1.0, OLD)])
    document = json.loads(path.read_text())
    assert list(document) == [
        "suite", "created", "commit", "gpu", "torch", "triton", "copy_tbs", "gemm_tflops",
        "records",
    ]  # fmt: skip
    assert {"case", "dtype", "batch", "variant", "median_ms"} <= set(document["records"][0])


def test_newer_replaces_older_and_each_keeps_its_own_run(tmp_path):
    path = tmp_path / "model.json"
    older = [record("fastswin", 1.0, OLD), record("eager", 9.0, OLD), record("eager", 8.0, OLD, 8)]
    save_records(path, OLD, older)
    save_records(path, NEW, [record("fastswin", 0.5, NEW)])
    document = load_document(path)
    found = {(r["variant"], r["batch"]): r for r in document["records"]}
    assert len(document["records"]) == 3
    assert (document["commit"], document["copy_tbs"]) == ("bbb", 2.9)
    ours, eager = found["fastswin", 1], found["eager", 1]
    assert (ours["median_ms"], ours["commit"], ours["copy_tbs"]) == (0.5, "bbb", 2.9)
    assert (eager["median_ms"], eager["commit"], eager["created"]) == (9.0, "aaa", OLD.created)
    assert (eager["torch"], eager["copy_tbs"]) == ("2.11.0", 3.02)


def test_other_dtypes_and_directions_are_other_records(tmp_path):
    forward, other = record("fastswin", 1.0, OLD), record("fastswin", 1.0, OLD, dtype="bf16")
    backward = {**forward, "direction": "backward"}
    assert len({record_key(r) for r in (forward, other, backward)}) == 3
    assert record_key(forward) == record_key({**forward, "direction": "forward"})


def test_dropped_keys_go(tmp_path):
    path = tmp_path / "model.json"
    red = record("fastswin", 1.0, OLD)
    save_records(path, OLD, [red, record("eager", 9.0, OLD)])
    save_records(path, NEW, [], drop=[record_key(red)])
    assert [r["variant"] for r in load_document(path)["records"]] == ["eager"]


@pytest.mark.parametrize("moment", ["write_text", "replace"])
def test_kill_in_the_middle_leaves_the_old_file(tmp_path, monkeypatch, moment):
    path = tmp_path / "card" / "model.json"
    save_records(path, OLD, [record("fastswin", 1.0, OLD)])
    before = path.read_bytes()

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    target = "pathlib.Path.write_text" if moment == "write_text" else "os.replace"
    monkeypatch.setattr(target, killed)
    with pytest.raises(KeyboardInterrupt):
        save_records(path, NEW, [record("fastswin", 0.5, NEW)])
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["model.json"]


@pytest.mark.parametrize("content", ["{", "[]", '{"records": [{"case": "x"}]}'])
def test_foreign_file_is_refused_and_left(tmp_path, content):
    path = tmp_path / "model.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="no benchmark record"):
        save_records(path, NEW, [record("fastswin", 0.5, NEW)])
    assert path.read_text() == content


def test_stamp_rounds_and_has_no_nan():
    values = stamp(OLD, {"case": "x", "median_ms": 1.23456789, "peak_mib": float("nan")})
    assert (values["median_ms"], values["peak_mib"]) == (1.2346, None)


def test_commit_from_git_with_dirty_mark(tmp_path, monkeypatch):
    monkeypatch.delenv("FASTSWIN_COMMIT", raising=False)

    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)

    assert current_commit(tmp_path) == "unknown"
    git("init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    head = git("rev-parse", "HEAD").stdout.strip()
    assert current_commit(tmp_path) == head
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "model.json").write_text("{}")
    assert current_commit(tmp_path) == head, "its own results do not make a tree dirty"
    (tmp_path / "code.py").write_text("2\n")
    assert current_commit(tmp_path) == f"{head}-dirty"
    monkeypatch.setenv("FASTSWIN_COMMIT", "abc")
    assert current_commit(tmp_path) == "abc"
