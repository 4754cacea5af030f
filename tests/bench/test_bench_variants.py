"""Variants of the engine in whole models: arguments, changes, waves, the table, one small run."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from fastswin.bench import problems, variants, variants_child
from fastswin.bench.problems import Problem
from fastswin.bench.variants_child import Ready
from fastswin.bench.variants_patch import del_item, replace_source, set_constant, set_item
from fastswin.bench.variants_plan import (
    ALIASES,
    Job,
    full_name,
    load_variants,
    parse_models,
    plan_waves,
)
from fastswin.bench.variants_table import HEADER, make_rows, make_table
from fastswin.bench.variants_turns import Result
from fastswin.engine import choice, whole_block
from fastswin.models import list_models

TINY_T, TINY_V2 = "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"
WHOLE_BLOCKS = "engine.whole_block:WHOLE_BLOCKS"


def write_file(folder: Path, text: str) -> Path:
    path = folder / "some_variants.py"
    path.write_text(text)
    return path


def test_models_are_full_names_or_aliases_and_numbers_repeat_the_model():
    found = parse_models(f"T:8,32, V2T:1,{TINY_T}:8,64", "fp16")
    assert found == [
        Problem(TINY_T, "fp16", 8), Problem(TINY_T, "fp16", 32), Problem(TINY_V2, "fp16", 1),
        Problem(TINY_T, "fp16", 64),
    ]  # fmt: skip


def test_aliases_are_models():
    assert {full_name(alias) for alias in ALIASES} == set(ALIASES.values()) <= set(list_models())


@pytest.mark.parametrize(
    "text", ["", ",", "8", "T", "T:", ":8", "T:0", "T:-1", "T:8,x", "T:8:fp16"]
)
def test_other_forms_of_models_are_refused(text):
    with pytest.raises(ValueError, match="models"):
        parse_models(text, "fp16")


def test_unknown_model_is_named_with_the_nearest():
    with pytest.raises(ValueError, match=f"swin_tinny.*{TINY_T}"):
        parse_models("swin_tinny_patch4_window7_224:8", "fp16")


@pytest.fixture
def restored(monkeypatch):
    """The tables and constants that tests below change are put back."""
    monkeypatch.setattr(whole_block, "WHOLE_BLOCKS", dict(whole_block.WHOLE_BLOCKS))
    monkeypatch.setattr(choice, "FUSED_MLP_CHANNELS", choice.FUSED_MLP_CHANNELS)


@pytest.mark.usefixtures("restored")
def test_entries_of_tables_are_set_and_removed_in_place():
    table = whole_block.WHOLE_BLOCKS
    key, value = next(iter(table.items()))
    set_item(WHOLE_BLOCKS, key, value + 1)
    set_item("fastswin." + WHOLE_BLOCKS, (9, 9), 5)
    assert (whole_block.WHOLE_BLOCKS is table, table[key], table[9, 9]) == (True, value + 1, 5)
    del_item(WHOLE_BLOCKS, key)
    assert key not in table


def test_constants_are_rebound_where_they_are_imported(monkeypatch):
    old, new = problems.seeded_images, object()
    own = [module for name, module in sys.modules.items() if name.startswith("fastswin.")]
    holders = [module for module in own if vars(module).get("seeded_images") is old]
    for module in holders:
        monkeypatch.setattr(module, "seeded_images", old)  # put back afterwards
    set_constant("bench.problems:seeded_images", new)
    assert {problems, variants_child} <= set(holders)
    assert all(module.seeded_images is new for module in holders)


@pytest.mark.usefixtures("restored")
def test_constants_of_another_value_elsewhere_stay(monkeypatch):
    same = choice.FUSED_MLP_CHANNELS
    monkeypatch.setattr(problems, "FUSED_MLP_CHANNELS", same, raising=False)
    monkeypatch.setattr(variants_child, "FUSED_MLP_CHANNELS", same + 1, raising=False)
    set_constant("engine.choice:FUSED_MLP_CHANNELS", 96)
    assert choice.FUSED_MLP_CHANNELS == problems.FUSED_MLP_CHANNELS == 96
    assert variants_child.FUSED_MLP_CHANNELS == same + 1


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    "change",
    [
        lambda: set_item(WHOLE_BLOCKS, *next(iter(whole_block.WHOLE_BLOCKS.items()))),
        lambda: del_item(WHOLE_BLOCKS, (7, 7)),
        lambda: set_constant("engine.choice:FUSED_MLP_CHANNELS", choice.FUSED_MLP_CHANNELS),
        lambda: set_constant("engine.choice:NOT_THERE", 1),
        lambda: set_constant("engine.not_there:NAME", 1),
        lambda: set_constant("FUSED_MLP_CHANNELS", 1),
        lambda: replace_source("engine.choice:FUSED_MLP_CHANNELS", "a", "b"),
    ],
    ids=["same entry", "no entry", "same value", "no name", "no module", "no place", "no kernel"],
)
def test_changes_that_change_nothing_are_refused(change):
    before = (dict(whole_block.WHOLE_BLOCKS), choice.FUSED_MLP_CHANNELS)
    with pytest.raises(ValueError, match="place"):
        change()
    assert (whole_block.WHOLE_BLOCKS, choice.FUSED_MLP_CHANNELS) == before


class StandInKernel:
    """The part of a JIT function that a change of its source uses."""

    def __init__(self, src):
        self.src, self.hash = src, "of the source before"

    def _unsafe_update_src(self, src):
        self.src = src


def test_source_of_kernels_is_replaced_and_hashes_of_all_are_dropped(monkeypatch):
    kernel, caller = StandInKernel("x = 1; y = 1"), StandInKernel("kernel()")
    monkeypatch.setattr(choice, "_kernel", kernel, raising=False)
    monkeypatch.setattr(whole_block, "_caller", caller, raising=False)
    for old, new, message in (("z", "w", "0 times"), ("1", "2", "2 times"), ("x", "x", "differ")):
        with pytest.raises(ValueError, match=message):
            replace_source("engine.choice:_kernel", old, new)
    assert kernel.hash
    replace_source("engine.choice:_kernel", "1", "2", count=2)
    assert (kernel.src, kernel.hash, caller.hash) == ("x = 2; y = 2", None, None)


def test_variants_may_be_confined_to_models(tmp_path):
    text = "VARIANTS = {'engine': None, 'a': print, 'b': print}\nONLY = {'b': ['V2T', 'T:8']}\n"
    file = load_variants(write_file(tmp_path, text))
    at = {batch: file.variants_of(Problem(TINY_T, "fp16", batch)) for batch in (1, 8)}
    assert at == {1: ["engine", "a"], 8: ["engine", "a", "b"]}
    assert file.variants_of(Problem(TINY_V2, "fp16", 1), ["b"]) == ["engine", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "define VARIANTS"),
        ("VARIANTS = {}", "define VARIANTS"),
        ("VARIANTS = {'a': 3}", r"VARIANTS\['a'\]"),
        ("VARIANTS = {'a': None}\nONLY = {'a': ['T']}", "ONLY"),
        ("VARIANTS = {'a': None, 'b': print}\nONLY = {'b': 'T'}", "ONLY"),
        ("VARIANTS = {'a': None, 'b': print}\nONLY = {'b': ['T:x']}", "ONLY"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_other_variants_files_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load_variants(write_file(tmp_path, text))


def test_jobs_of_a_problem_stay_in_one_wave():
    counts = {1: 3, 2: 2, 4: 2, 8: 1}
    jobs = [
        Job(Problem(TINY_T, "fp16", batch), str(n), Path("f.py"), "cpu")
        for batch, count in counts.items()
        for n in range(count)
    ]
    waves = plan_waves(jobs, 4)
    assert [[job.problem.batch for job in wave] for wave in waves] == [[1] * 3, [2, 2, 4, 4], [8]]
    assert [job for wave in waves for job in wave] == jobs
    with pytest.raises(ValueError, match="processes must be at least 3"):
        plan_waves(jobs, 2)


def made_up(variant, turns_us, error=1e-4, bits="a", failure="", batch=8):
    job = Job(Problem(TINY_T, "fp16", batch), variant, Path("f.py"), "cuda")
    ready = None if error is None else Ready(error, bits, "made up", 1.0)
    return Result(job, ready, turns_us, failure)


def test_rows_and_table_of_made_up_turns():
    rows = make_rows(
        [
            made_up("engine", {1: 100.0, 2: 110.0, 3: 120.0}),
            made_up("fast", {1: 90.0, 2: 88.0, 3: 108.0}, bits="b"),
            made_up("wrong", {1: 50.0}, error=4.1e-3),
            made_up("nan", {1: 50.0}, error=math.nan),
            made_up("dead", {}, error=None, failure="its process died"),
            made_up("engine", {1: 400.0}, batch=32),
        ]
    )
    engine, fast, wrong, nan, dead, other = rows
    assert (engine.ratio, engine.min_ratio, engine.paired_ratio) == (1.0, 1.0, 1.0)
    assert (fast.median_us, fast.min_us) == (90.0, 88.0)
    assert fast.ratio == pytest.approx(90 / 110)
    assert fast.min_ratio == pytest.approx(88 / 100)
    assert fast.paired_ratio == pytest.approx(0.9)
    assert [row.same_bits for row in rows] == [True, False, True, True, None, True]
    assert [row.wrong for row in rows] == [False, False, True, True, False, False]
    assert (wrong.relative_error, nan.relative_error, other.ratio) == (4.1e-3, None, 1.0)
    assert (dead.median_us, dead.ratio, dead.failure) == (None, None, "its process died")
    cells = make_table(rows, "title").rows
    assert cells[1] == (
        TINY_T, "fast", "8", "90.0", "88.0", "0.8182", "0.8800", "0.9000", "1.0e-04", "differ", "3",
        "",
    )  # fmt: skip
    assert [row[-1] for row in cells] == ["", "", "WRONG", "WRONG", "failed: its process died", ""]
    assert {len(row) for row in cells} == {len(HEADER)}


def test_without_a_baseline_there_are_no_ratios():
    _, row = make_rows([made_up("engine", {}, None, failure="x"), made_up("a", {1: 2.0})])
    assert (row.median_us, row.ratio, row.paired_ratio, row.same_bits) == (2.0, None, None, None)


SMALL_RUN = """
import os

from fastswin.bench import problems
from fastswin.bench.variants_patch import set_constant

seeded_images = problems.seeded_images


def other_images():
    set_constant("bench.problems:seeded_images", lambda *a, **n: 2 * seeded_images(*a, **n))


def fails():
    print("about to fail")
    set_constant("engine.choice:NOT_THERE", 1)


VARIANTS = {
    "engine": None, "other-images": other_images, "fails": fails, "dies": lambda: os._exit(3),
}
"""


def test_small_run_on_a_cpu(tmp_path, monkeypatch, capsys, tiny_problem):
    monkeypatch.setattr(variants, "parse_models", lambda text, dtype: [tiny_problem])
    path, out = write_file(tmp_path, SMALL_RUN), tmp_path / "out"
    arguments = ["--models", "T:2", "--variants", str(path), "--device", "cpu"]
    code = variants.main(
        [*arguments, "--seconds", "0.1", "--build-s", "100", "--out", str(out), "--reports"]
    )
    printed = capsys.readouterr()
    assert code == 1
    assert "about to fail" in printed.err
    document = json.loads((out / variants.TURNS_FILE).read_text())
    engine, other, failed, dead = document["rows"]
    names = ["engine", "other-images", "fails", "dies"]
    assert [row["variant"] for row in document["rows"]] == names
    for row in (engine, other):
        assert (row["failure"], row["wrong"], row["dtype"]) == ("", False, "fp32")
        assert row["relative_error"] < 1e-4
        assert len(row["turns_us"]) >= 2
        assert "0" not in row["turns_us"]
        assert 0 < row["min_us"] <= row["median_us"]
    assert (engine["ratio"], engine["same_bits"], other["same_bits"]) == (1.0, True, False)
    assert "NOT_THERE" in failed["failure"]
    assert dead["failure"] == "its process died with exit code 3"
    assert failed["median_us"] is dead["median_us"] is None
    assert all(name in printed.out for name in (*HEADER, "differ", "failed: ValueError"))
    reports = (out / variants.REPORTS_FILE).read_text()
    assert reports.count("== tiny fp32 batch 2") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", "T"], "models"),
        (["--only", "slow"], "only"),
        (["--seconds", "0"], "seconds"),
        (["--processes", "1"], "processes"),
        (["--reports"], "out"),
        (["--dtype", "tf32"], "tf32"),
        (["--device", "tpu"], "device"),
        (["--variants", "not-there.py"], "not-there.py"),
    ],
)
def test_wrong_arguments_start_nothing(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.setattr(variants, "run_wave", lambda *_: pytest.fail("a wave was started"))
    path = write_file(tmp_path, "VARIANTS = {'engine': None, 'fast': print}")
    usual = ["--models", "T:8", "--variants", str(path), "--device", "cpu"]
    assert variants.main([*usual, *options]) == 2
    assert message in capsys.readouterr().err
