"""SWO-28 in every form, through the suite and its command line, on a tiny model."""

import dataclasses
import json

import pytest
import torch

from fastswin.bench import __main__ as command
from fastswin.bench import contenders, suites
from fastswin.bench.contenders import VARIANTS, build_contender
from fastswin.bench.failures import UnavailableError
from fastswin.bench.precision import tf32_state
from fastswin.bench.problems import Problem, seeded_images
from fastswin.bench.source import build_source


def statuses(result):
    return {outcome.variant: outcome.status for outcome in result.outcomes}


@pytest.mark.parametrize("iterations", [1, 50])
@pytest.mark.parametrize("warmup", [0, 10])
def test_record_states_what_was_measured(run_suite, tiny_problem, iterations, warmup):
    result = run_suite([tiny_problem], iterations=iterations, warmup=warmup)
    assert result.exit_code == 0
    eager, ours = result.document["records"]
    assert (ours["variant"], eager["variant"]) == ("fastswin", "eager")
    for record in (ours, eager):
        assert record["count"] == iterations
        assert 0 < record["p20_ms"] <= record["median_ms"] <= record["p80_ms"] <= record["p90_ms"]
        assert record["graph"] is False
        assert record["tf32"] is False
        assert record["max_abs_err"] <= record["gate_max_abs"] == 1e-4
        assert record["images_per_s"] == pytest.approx(2e3 / record["median_ms"], rel=1e-3)
        assert record["commit"] == result.document["commit"]
    assert json.loads(result.path.read_text()) == result.document


@pytest.mark.parametrize("batch", [1, 32])
def test_batches(run_suite, tiny_problem, batch):
    result = run_suite([dataclasses.replace(tiny_problem, batch=batch)])
    assert result.exit_code == 0
    assert {record["batch"] for record in result.document["records"]} == {batch}


@pytest.mark.parametrize("order", [("fp32", "tf32"), ("tf32", "fp32")])
def test_precisions_in_both_orders_leave_the_flags(run_suite, tiny_problem, order):
    """TF32 rows on a CPU would be fp32 rows under another name, so there are none."""
    before = tf32_state()
    problems = [dataclasses.replace(tiny_problem, dtype=dtype) for dtype in order]
    result = run_suite(problems, ["eager"])
    assert tf32_state() == before
    assert [record["dtype"] for record in result.document["records"]] == ["fp32"]
    assert [line for line in result.problems_found if "tf32" in line and "GPU" in line]
    assert result.exit_code == 1


def test_a_contender_that_changes_the_flags_is_red(run_suite, tiny_problem, engine, monkeypatch):
    before = tf32_state()

    def meddle(self, images):
        torch.backends.cuda.matmul.allow_tf32 = True
        return self.model(images)

    monkeypatch.setattr(engine, "__call__", meddle)
    result = run_suite([tiny_problem])
    assert statuses(result) == {"fastswin": "red", "eager": "ok"}
    assert "TF32" in result.problems_found[0]
    assert tf32_state() == before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda logits: logits + 2e-4,
        lambda logits: logits.index_fill(1, torch.tensor([3]), float("nan")),
        lambda logits: logits.roll(1, 0),
        lambda logits: logits[:, :-1],
    ],
    ids=["off-by-2e-4", "nan", "images-swapped", "wrong-shape"],
)
def test_wrong_answers_print_no_speed(run_suite, tiny_problem, engine, monkeypatch, spoil):
    right = engine.__call__
    assert run_suite([tiny_problem]).exit_code == 0
    monkeypatch.setattr(engine, "__call__", lambda self, images: spoil(right(self, images)))
    lines = []
    result = run_suite([tiny_problem], progress=lines.append)
    assert result.exit_code == 1
    assert statuses(result) == {"fastswin": "red", "eager": "ok"}
    assert not [line for line in lines if " fastswin:" in line and " ms" in line]
    stored = json.loads(result.path.read_text())["records"]
    assert [r["variant"] for r in stored] == ["eager"], "the older, right record is no longer true"


def test_low_precision_is_judged_by_eager_in_that_precision(run_suite, tiny_problem):
    problem = dataclasses.replace(tiny_problem, dtype="fp16")
    result = run_suite([problem])
    assert result.exit_code == 0
    eager, ours = result.document["records"]
    assert eager["max_abs_err"] > 1e-4
    assert eager["gate_max_abs"] == pytest.approx(1.5 * eager["max_abs_err"], rel=0.05)
    assert ours["gate_rel_rms"] > ours["rel_rms_err"]


def test_out_of_memory_keeps_the_rest(run_suite, tiny_problem, monkeypatch):
    """The second batch does not fit: its line is readable, the other records are on disk."""
    eager = VARIANTS["eager"]

    def hungry(source, problem, images):
        if problem.batch == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.\nSee docs.")
        return eager(source, problem, images)

    monkeypatch.setitem(contenders.VARIANTS, "eager", hungry)
    problems = [dataclasses.replace(tiny_problem, batch=batch) for batch in (1, 4, 2)]
    result = run_suite(problems)
    assert result.exit_code == 1
    assert result.problems_found == [
        "tiny fp32 batch 4 eager: oom: out of memory: CUDA out of memory. Tried to allocate 1 TiB."
    ]
    stored = json.loads(result.path.read_text())["records"]
    measured = sorted((record["batch"], record["variant"]) for record in stored)
    assert measured == [
        (1, "eager"), (1, "fastswin"), (2, "eager"), (2, "fastswin"), (4, "fastswin"),
    ]  # fmt: skip


def test_interrupt_keeps_finished_problems(run_suite, tiny_problem, tmp_path, monkeypatch):
    eager = VARIANTS["eager"]

    def interrupted(source, problem, images):
        if problem.batch == 2:
            raise KeyboardInterrupt
        return eager(source, problem, images)

    monkeypatch.setitem(contenders.VARIANTS, "eager", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_suite([dataclasses.replace(tiny_problem, batch=1), tiny_problem])
    (path,) = tmp_path.glob("*/model.json")
    assert {r["batch"] for r in json.loads(path.read_text())["records"]} == {1}


def test_no_gpu_is_said(run_suite, tiny_problem):
    """Defaults run what a CPU can, report the rest, and do not pass for a GPU result."""
    lines = []
    result = run_suite([tiny_problem], ["eager", "eager-graph"], device=None, progress=lines.append)
    assert result.exit_code == 1
    assert any("no GPU found" in line for line in lines)
    assert statuses(result) == {"eager": "ok", "eager-graph": "unavailable"}
    assert len(result.document["records"]) == 1


def test_named_gpu_that_is_absent_raises_before_anything_runs(run_suite, tiny_problem, tmp_path):
    with pytest.raises(RuntimeError, match="'cuda' was asked for, but PyTorch finds no GPU"):
        run_suite([tiny_problem], device="cuda")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variant", ["eager-graph", "compile-reduce-overhead"])
def test_gpu_contenders_tell_why_they_are_absent(tiny_problem, variant):
    images = seeded_images(tiny_problem, 2, torch.device("cpu"), 0)
    with pytest.raises(UnavailableError, match="need a GPU"):
        build_contender(variant, build_source(tiny_problem), tiny_problem, images)


def test_missing_engine_is_reported(run_suite, tiny_problem, monkeypatch):
    monkeypatch.delattr("fastswin.engine.Engine")
    result = run_suite([tiny_problem])
    assert statuses(result) == {"fastswin": "unavailable", "eager": "ok"}
    assert "cannot be imported" in result.outcomes[0].message


def test_defaults_forgive_absent_contenders_and_named_ones_do_not(run_suite, tiny_problem):
    named = run_suite([tiny_problem], ["eager", "eager-graph"])
    forgiven = dataclasses.replace(named, required=None)
    assert (named.exit_code, forgiven.exit_code) == (1, 0)


def test_deadline_skips_and_says_so(run_suite, tiny_problem):
    result = run_suite([tiny_problem], deadline_s=-1.0)
    assert set(statuses(result).values()) == {"skipped"}
    assert result.exit_code == 1


def test_logits_are_cloned(tiny_problem, monkeypatch):
    """A graph contender overwrites its output: what is compared must not change afterwards."""
    static = torch.zeros(2, 10)

    def graph_like(source, problem, images):
        return contenders._Built(lambda new: static.copy_(new.mean((1, 2, 3))[:, None]))

    monkeypatch.setitem(contenders.VARIANTS, "eager", graph_like)
    images = [seeded_images(tiny_problem, 2, torch.device("cpu"), seed) for seed in (0, 1)]
    contender = build_contender("eager", build_source(tiny_problem), tiny_problem, images[0])
    first = contender.logits(images[0])
    kept = first.clone()
    assert not torch.equal(contender.logits(images[1]), kept)
    assert torch.equal(first, kept)


def test_jit_trace_agrees(run_suite, tiny_problem):
    result = run_suite([tiny_problem], ["jit-trace"])
    assert result.exit_code == 0
    assert result.document["records"][0]["build_s"] > 0


@pytest.fixture
def tiny_command(run_suite, tiny_problem, monkeypatch):
    """The command line on the tiny problem; ``run_suite`` has fixed the ceilings."""
    monkeypatch.setattr(command, "make_problems", lambda *a: [tiny_problem])
    return command.main


def test_json_is_the_only_thing_on_stdout(tiny_command, tmp_path, capsys):
    arguments = "--variants eager --device cpu --iterations 1 --warmup 0 --json"
    assert tiny_command(["model", "--out", str(tmp_path), *arguments.split()]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["suite"] == "model"
    assert document["records"][0]["case"] == "tiny"
    assert "tiny fp32 batch 2 eager" in err


def test_command_reports_failures_and_keeps_results(tiny_command, tmp_path, capsys):
    arguments = "--variants eager,eager-graph --device cpu --iterations 1 --warmup 0"
    assert tiny_command(["model", "--out", str(tmp_path), *arguments.split()]) == 1
    out, err = capsys.readouterr()
    assert "eager ms" in out
    assert "not measured: tiny fp32 batch 2 eager-graph: unavailable" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--device cuda", "no GPU"),
        ("--device cpu --models swin_tiny_patch4", "nearest: swin_tiny_patch4_window7_224"),
        ("--device cpu --dtypes fp64", "dtypes: unknown 'fp64'"),
        ("--device cpu --batches 1,0", "batches must be positive integers"),
        ("--device cpu --variants tensorflow", "variants: unknown"),
        ("--device cpu --iterations 0", "iterations must be at least 1"),
    ],
)
def test_wrong_arguments_exit_2_with_a_line(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(suites, "measure_ceilings", lambda *a: pytest.fail("it ran"))
    assert command.main(["model", "--out", str(tmp_path), *arguments.split()]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_problem_rejects_what_it_cannot_be():
    with pytest.raises(ValueError, match="dtype must be one of"):
        Problem("swin_tiny_patch4_window7_224", "fp4")
