"""Suite ``startup``: fresh processes, cold and warm, right answers only."""

from __future__ import annotations

import json

import pytest

from fastswin.bench import startup
from fastswin.bench.problems import Problem
from fastswin.bench.roofline import Ceilings
from fastswin.bench.startup import run_startup
from fastswin.bench.startup_tables import make_startup_table
from fastswin.models import SwinConfig

CONFIG = SwinConfig(
    image_size=(16, 24), embed_dim=16, depths=(1,), num_heads=(1,), window_size=2, num_classes=3
)
STARTED = tuple(f"{part}_s" for part in startup.PARTS)
PROBLEM = Problem("small", "fp32", 2, config=CONFIG)


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch):
    monkeypatch.setattr(
        startup, "measure_device", lambda *_: Ceilings(0.01, {"fp16": 0.1, "fp32": 0.1})
    )


def test_starts_are_measured_checked_and_recorded(tmp_path):
    result = run_startup(
        [PROBLEM], ["fastswin"], device="cpu", out=tmp_path, warm_starts=1
    )  # fmt: skip
    assert result.problems_found == ()
    document = json.loads(result.path.read_text())
    assert (document["suite"], result.path.name) == ("startup", "startup.json")
    assert [r["case"] for r in document["records"]] == ["small, cold cache", "small, warm cache"]
    for record in document["records"]:
        parts = sum(record[part] for part in STARTED)
        assert record["median_ms"] / 1e3 == pytest.approx(parts, rel=0.01)
        assert record["max_abs_err"] < 1e-4
        assert (record["variant"], record["dtype"], record["batch"]) == ("fastswin", "fp32", 2)
    table = make_startup_table(document)
    assert [row[:4] for row in table.rows] == [
        (f"small, {cache} cache", "fp32", "2", "fastswin") for cache in ("cold", "warm")
    ]
    for row, record in zip(table.rows, document["records"], strict=True):
        assert row[4:6] == (f"{record['median_ms'] / 1e3:.2f}", "1.00x")
        assert row[6:] == tuple(f"{record[part]:.2f}" for part in STARTED)


def test_every_start_has_cache_folders_of_its_own_and_warm_ones_share_them(tmp_path, monkeypatch):
    seen = []

    def start(problem, variant, device, folder, cache, gate):
        seen.append((variant, cache, (cache / "used").exists()))
        (cache / "used").touch()
        parts = dict.fromkeys(STARTED[:-1], 1.0) | {"first_call_s": len(seen), "max_abs_err": 0.0}
        return parts | {"total_s": 3.0 + len(seen)}

    monkeypatch.setattr(startup, "_start", start)
    result = run_startup(
        [PROBLEM], ["fastswin", "eager"], device="cpu", out=tmp_path, warm_starts=3
    )  # fmt: skip
    assert [(variant, used) for variant, _, used in seen] == [
        (variant, used)
        for variant in ("fastswin", "eager")
        for used in (False, True, True, True)
    ]  # fmt: skip
    assert len({cache for _, cache, _ in seen}) == 2
    assert not any(cache.exists() for _, cache, _ in seen)
    medians = {(r["variant"], r["case"]): r["median_ms"] for r in result.records}
    assert medians["fastswin", "small, cold cache"] == 4000.0
    assert medians["fastswin", "small, warm cache"] == 6000.0


@pytest.mark.parametrize("installed", [True, False])
def test_bytecode_is_cached_where_the_installation_has_none(tmp_path, monkeypatch, installed):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(startup, "bytecode_installed", lambda: installed)
    environment = startup.make_environment(tmp_path)
    prefix = None if installed else str(tmp_path / "bytecode")
    assert environment.get("PYTHONPYCACHEPREFIX") == prefix
    assert ("PYTHONDONTWRITEBYTECODE" in environment) == installed


def test_a_start_that_fails_is_named_and_leaves_no_record(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("wrong logits: 3 logits are NaN or infinite")

    monkeypatch.setattr(startup, "_start", fail)
    result = run_startup([PROBLEM], ["fastswin"], device="cpu", out=tmp_path)
    assert result.records == ()
    assert result.problems_found == (
        "small fp32 batch 2 fastswin: wrong logits: 3 logits are NaN or infinite",
    )
    skipped = run_startup([PROBLEM], ["fastswin"], device="cpu", out=tmp_path, deadline_s=-1.0)
    assert "the deadline of -1 s is over" in skipped.problems_found[0]


def test_arguments_are_checked_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match="variants must be among fastswin, compile"):
        run_startup([PROBLEM], ["onnx"], device="cpu", out=tmp_path)
    with pytest.raises(ValueError, match="warm_starts must be at least 1"):
        run_startup([PROBLEM], device="cpu", out=tmp_path, warm_starts=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_the_first_result_on_the_card_is_in_time(tmp_path):
    """The targets: 20 s with cold caches, 3 s with warm ones."""
    problems = startup.startup_problems(["swin_tiny_patch4_window7_224"], None, None, None)
    result = run_startup(problems, ["fastswin"], out=tmp_path)
    assert result.problems_found == ()
    cold, warm = (record["median_ms"] for record in result.records)
    assert cold <= 20_000
    assert warm <= 3_000
