"""Whole models decide: scripted gains, and what becomes of a table's rows."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch

from fastswin.bench import tune_models, tune_twins, tune_whole
from fastswin.bench.timing import HostClock
from fastswin.bench.tune import Tuner
from fastswin.bench.tune_select import Comparison, Proposal, Selection
from fastswin.bench.tune_units import Times, Unit, problems_of, propose, rows_of, tuning_group
from fastswin.bench.tune_whole import Measured, time_captures
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.models import VARIANTS, SwinConfig, find_variant
from fastswin.tuning.document import empty_document
from fastswin.tuning.layers import qkv_layer
from fastswin.tuning.problem import config_to_dict, make_problem
from fastswin.tuning.space import candidates
from fastswin.tuning.table import TuningTable

CPU = torch.device("cpu")
A, B = (Unit(qkv_layer("fp16", 1000 * n, 96, False), "tiled") for n in (1, 2))
OTHER_FORM = Unit(A.problem, "library")
T8, S8 = ("T", 8), ("S", 8)


def select(gains, proposals=None, deadline_s=60.0, base_ms=1.0):
    """Run a selection where a case gains the product of its units' scripted gains."""
    cases = list(dict.fromkeys(case for case, _ in gains))
    if proposals is None:
        units = list(dict.fromkeys(unit for _, unit in gains))
        proposals = {
            case: Proposal(
                {unit: 50.0 for unit in units if (case, unit) in gains},
                {unit.problem for unit in units if (case, unit) in gains},
            )
            for case in cases
        }
    asked = []

    def measure(case, contenders, captures):
        asked.append((case, tuple(contenders)))
        found = []
        for units in contenders:
            own = [gains[case, unit] for unit in units]
            bad = any(math.isinf(gain) for gain in own)
            gain = 0.0 if bad else math.prod(1 + gain for gain in own) - 1
            found.append(Measured(base_ms / (1 + gain), gain, math.inf if bad else 0.001))
        return base_ms, found

    selection = Selection(proposals, measure, time.monotonic() + deadline_s)
    verdicts, comparisons = selection.run()
    return verdicts, {(c.model, c.batch): c for c in comparisons}, asked


def test_units_that_gain_stay_and_those_that_lose_go():
    verdicts, found, _ = select({(T8, A): 0.02, (T8, B): -0.01})
    assert verdicts == {A: "gain", B: "loss"}
    assert found[T8] == Comparison("T", 8, 1.0, 1 / 1.02, 0.001, units=1)


@pytest.mark.parametrize(
    ("gain", "verdict"),
    [(0.002, "none"), (-0.0005, "none"), (-0.003, "none"), (-0.03, "loss"), (math.inf, "loss")],
    ids=["noise", "nothing", "slightly-less", "less", "not-finite"],
)
def test_a_model_that_does_not_gain_keeps_its_heuristics(gain, verdict):
    verdicts, found, _ = select({(T8, A): gain})
    assert verdicts == {A: verdict}
    assert (found[T8].units, found[T8].tuned_ms) == (0, 1.0)


def test_of_two_forms_of_a_layer_the_better_is_kept():
    verdicts, found, _ = select({(T8, A): 0.01, (T8, OTHER_FORM): 0.03})
    assert verdicts == {A: "none", OTHER_FORM: "gain"}
    assert found[T8].units == 1


def test_shared_units_stay_only_if_one_gains_and_none_loses():
    verdicts, found, _ = select({(T8, A): 0.02, (S8, A): -0.01, (S8, B): 0.02})
    assert verdicts == {A: "loss", B: "gain"}
    assert (found[T8].units, found[S8].units) == (0, 1)
    verdicts, found, _ = select({(T8, A): 0.02, (S8, A): 0.0})
    assert verdicts == {A: "gain"}
    assert (found[T8].units, found[S8].units) == (1, 1)


def test_a_case_is_measured_with_units_that_others_proposed():
    """Swin-S would run Swin-T's rows although it did not ask for them; it loses with them."""
    proposals = {T8: Proposal({A: 50.0}, {A.problem}), S8: Proposal({}, {A.problem})}
    verdicts, found, asked = select({(T8, A): 0.02, (S8, A): -0.02}, proposals)
    assert (S8, ((A,),)) in asked
    assert verdicts == {A: "loss"}
    assert [found[case].units for case in (T8, S8)] == [0, 0]
    assert found[T8].message == found[S8].message == ""


def test_units_that_promise_too_little_are_not_tried():
    proposals = {T8: Proposal({A: 50.0, B: 1.0}, {A.problem, B.problem})}
    verdicts, _, asked = select({(T8, A): 0.02}, proposals)  # B: 0.1 % of a millisecond
    assert verdicts == {A: "gain", B: "none"}
    assert not any((B,) in contenders for _, contenders in asked)


def test_a_deadline_leaves_units_untried():
    verdicts, found, asked = select({(T8, A): 0.02}, deadline_s=-1.0)
    assert (verdicts, asked) == ({A: "untried"}, [])
    assert found[T8].message == "the deadline is over"


def test_one_failing_case_does_not_end_the_others():
    def measure(case, contenders, captures):
        if case == T8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1.0, [Measured(0.9, 0.1, 0.0) for _ in contenders]

    proposals = {case: Proposal({A: 50.0}, {A.problem}) for case in (T8, S8)}
    lines = []
    selection = Selection(proposals, measure, time.monotonic() + 60, lines.append)
    verdicts, (first, second) = selection.run()
    assert "out of memory" in first.message
    assert second.units == 1
    assert verdicts == {A: "gain"}
    assert any("T batch 8: out of memory" in line for line in lines)


NAME = "swin_tiny_patch4_window7_224"


def plan_of(batch):
    config = find_variant(NAME)
    return make_plan(config, batch, config.image_size, CPU, PRECISIONS["fp16"], "triton")


def scripted_times(batch, faster=()):
    """Every launch takes 10 us, those of ``faster`` operators 6 with their best tiles."""
    kernels, _ = tuning_group(find_variant(NAME), plan_of(batch), "fp16")
    best = {k: 6.0 if k.op in faster else 10.0 for k in kernels}
    return Times(best, dict.fromkeys(kernels, 10.0))


def test_proposals_are_what_is_faster_than_the_engines_own_choice():
    config, plan = find_variant(NAME), plan_of(32)
    own = [(s.qkv, s.mlp) for s in plan.stages]
    assert own[0] == ("fused", "fused")
    assert own[2] == ("library", "library")
    (only,) = propose(config, plan, "fp16", scripted_times(32))  # a launch less than the library's
    assert (only.problem.dims["C"], only.form) == (192, "fused")
    found = propose(config, plan, "fp16", scripted_times(32, ["linear"]))
    layers = {(u.problem.layer, u.problem.dims["C"], u.form): us for u, us in found.items()}
    assert layers["qkv", 384, "tiled"] == pytest.approx(4.0 * 6)  # in each of six blocks
    assert layers["mlp", 384, "library"] == pytest.approx(4.0 * 6)  # the same form, better tiles
    assert ("qkv", 96, "tiled") not in layers  # a LayerNorm more than the fused form's 10 us
    assert list(found.values()) == sorted(found.values(), reverse=True)
    windows = propose(config, plan, "fp16", scripted_times(32, ["window_attention"]))
    assert sum(unit.form == "" for unit in windows) == config.num_stages


def row_of(kernel, card, **changes):
    config = candidates(kernel, card)[1]
    return {
        "op": kernel.op, "dtype": kernel.dtype, "triton": "3.8", "shape": kernel.dims,
        "rows": kernel.rows, "range": [kernel.rows, kernel.rows],
        "config": config_to_dict(config), "shared_bytes": 1024, "latency_us": 6.0,
        "default_us": 10.0, "verdict": "untried",
    } | changes  # fmt: skip


def layer_row_of(layer):
    return {
        "layer": layer.layer, "dtype": "fp16", "triton": "3.8", "shape": layer.dims,
        "rows": layer.rows, "range": [layer.rows, layer.rows], "choice": "tiled",
        "latency_us": {"tiled": 6.0, "library": 7.0}, "verdict": "untried",
    }  # fmt: skip


def document_for(card, batch=32):
    config = find_variant(NAME)
    kernels, layers = tuning_group(config, plan_of(batch), "fp16")
    configs = [row_of(k, card) for k in kernels if len(candidates(k, card)) > 1]
    choices = [layer_row_of(layer) for layer in layers if layer.layer == "qkv"]
    return empty_document(card) | {"configs": configs, "choices": choices}


def test_a_trial_table_changes_its_units_alone(card):
    document, config, plain = document_for(card), find_variant(NAME), plan_of(32)
    (layer,) = [u for u in problems_of(config, plain, "fp16")
                if getattr(u, "layer", "") == "qkv" and u.dims["C"] == 384]  # fmt: skip
    trial = rows_of(document, [Unit(layer, "tiled")], "taken")
    table = TuningTable(trial, card, "3.8.0", "trial")
    size = config.image_size
    plan = make_plan(config, 32, size, CPU, PRECISIONS["fp16"], "triton", table)
    assert not table.refused
    assert plan.stages[2].qkv == "tiled"
    assert set(plan.stages[2].launch) == {"qkv"}
    for stage in (0, 1, 3):
        assert plan.stages[stage] == plain.stages[stage]


@pytest.fixture
def tuner(card, compiler, tmp_path):
    """A tuner that has measured Swin-T at batch 32."""
    deadline = time.monotonic() + 60
    made = Tuner(tmp_path / "t.json", card, CPU, HostClock(), compiler, "3.8.0", deadline)
    made.document = document_for(card)
    foreign = row_of(make_problem("mlp", "fp16", 7, C=96, hidden=384, post_norm=0), card)
    made.document["configs"].append({**foreign, "verdict": "gain"})
    made.start([tuning_group(find_variant(NAME), plan_of(32), "fp16")])
    return made


def qkv_units(stage):
    layer = qkv_layer("fp16", 32 * (56 >> stage) ** 2, 96 << stage, False)
    return Unit(layer, "tiled"), Unit(layer, "library")


def test_verdicts_and_times_are_written_into_the_table(tuner):
    verdicts = {qkv_units(1)[0]: "loss", qkv_units(1)[1]: "gain", qkv_units(2)[0]: "gain",
                qkv_units(3)[0]: "loss"}  # fmt: skip
    compared = [Comparison(NAME, 32, 1.1344, 1.1, 0.001, units=2),
                Comparison(NAME, 8, None, None, None, "out of memory")]  # fmt: skip
    tuner.decide(verdicts, compared, "fp16")
    document = json.loads(tuner.path.read_text())
    choices = {row["shape"]["C"]: (row["choice"], row["verdict"]) for row in document["choices"]}
    assert choices[192] == ("library", "gain")  # the form that won, not that of the shorter sum
    assert choices[384] == ("tiled", "gain")
    assert choices[768][1] == "loss"
    assert choices[96][1] == "none"
    tiles = {
        (row["shape"].get("K"), row["rows"]): row["verdict"]
        for row in document["configs"]
        if row["op"] == "linear" and not row["shape"]["gelu"]
    }
    assert tiles[384, 6272] == "gain"
    assert tiles[192, 25088] == tiles[768, 1568] == "loss"
    assert {row["verdict"] for row in document["configs"] if row["op"] == "mlp"} == {"none", "gain"}
    (model,) = document["models"]
    assert (model["model"], model["batch"], model["heuristic_ms"]) == (NAME, 32, 1.1344)


@pytest.mark.parametrize(
    ("before", "now", "after"),
    [("gain", "none", "gain"), ("gain", "loss", "loss"), ("loss", "gain", "loss"),
     ("untried", "none", "none"), ("none", "gain", "gain")],
    ids=lambda word: word,
)  # fmt: skip
def test_models_of_earlier_runs_keep_their_say(tuner, before, now, after):
    row = next(r for r in tuner.document["choices"] if r["shape"]["C"] == 384)
    row["verdict"] = before
    compared = [Comparison(NAME, 32, 1.1, 1.0, 0.001, units=1)]
    tuner.document["models"] = [{"model": NAME, "batch": 32, "dtype": "fp16"}]
    tuner.decide({qkv_units(2)[0]: now}, compared, "fp16")
    assert row["verdict"] == now  # nobody else has said anything
    row["verdict"] = before
    tuner.document["models"].append({"model": "swin_other", "batch": 32, "dtype": "fp16"})
    tuner.decide({qkv_units(2)[0]: now}, compared, "fp16")
    assert row["verdict"] == after


def test_rows_that_repeat_the_heuristics_tiles_do_not_answer(tuner):
    unit = qkv_units(2)[0]
    (row,) = [r for r in tuner.document["configs"] if r["rows"] == 6272 and r["op"] == "linear"
              and r["shape"]["N"] == 1152]  # fmt: skip
    row["latency_us"] = row["default_us"]
    tuner.decide({unit: "gain"}, [], "fp16")
    assert row["verdict"] == "none"
    assert any(r["verdict"] == "gain" for r in tuner.document["choices"])


@pytest.mark.parametrize("fault", [None, "compile", "check"], ids=["passes", "compile", "check"])
def test_rows_answer_for_bf16_where_it_compiles_and_is_right(tuner, fault, monkeypatch):
    seen = []

    def check_of(bench):
        seen.append(bench.problem)
        return lambda config: "results differ from run to run" if fault == "check" else None

    monkeypatch.setattr(tune_twins, "make_check", check_of)
    monkeypatch.setattr(tune_twins, "make_bench", lambda problem, device: type("B", (), {
        "problem": problem}))  # fmt: skip
    tuner.document["configs"].pop()  # the foreign row
    tuner.decide({qkv_units(2)[0]: "gain"}, [], "fp16")
    (row,) = [r for r in tuner.document["configs"] if r["verdict"] == "gain"]
    if fault == "compile":
        tuner.compiler.fails = {candidates(seen_problem(row), tuner.card)[1]: "too much memory"}
    tuner.check_twins(time.monotonic() + 60)
    (form,) = [r for r in tuner.document["choices"] if r["verdict"] == "gain"]
    expected = ["bf16"] if fault is None else []
    assert row["also"] == form["also"] == expected
    assert [p.dtype for p in seen] == ([] if fault == "compile" else ["bf16"])
    table = TuningTable(json.loads(tuner.path.read_text()), tuner.card, "3.8.0", "t.json")
    found = table.choice(qkv_layer("bf16", 6272, 384, False))
    assert (found is None) == bool(fault)


def seen_problem(row):
    return make_problem(row["op"], row["dtype"], row["rows"], **row["shape"])


def test_captures_are_timed_by_turns():
    class Steps(HostClock):
        """Every call takes its own milliseconds."""

        def elapsed_ms(self, call, calls):
            return call() * calls

    turns = time_captures([lambda: 4.0, lambda: 3.0], Steps(), 3)
    assert turns == [[4.0, 3.0]] * 3


def test_whole_models_are_measured_under_their_units(monkeypatch, card, compiler, tmp_path):
    """On a CPU all plans are plain PyTorch: no difference between them."""
    config = SwinConfig(
        image_size=(16, 32), embed_dim=32, depths=(1,), num_heads=(1,), window_size=4, num_classes=5
    )
    monkeypatch.setitem(VARIANTS, "swin_test", config)
    monkeypatch.setattr(tune_models, "propose", lambda *_: {A: 1e9})
    monkeypatch.setattr(tune_whole, "SAMPLE_MS", 0.1)
    deadline = time.monotonic() + 60
    tuner = Tuner(tmp_path / "t.json", card, CPU, HostClock(), compiler, "3.8.0", deadline)
    lines = []
    whole = tune_models.Whole(tuner, [("swin_test", 2)], "fp32", lines.append)
    whole.build()
    (compared,) = whole.decide(time.monotonic() + 60, HostClock())
    assert (compared.message, compared.max_abs_diff) == ("", 0.0)
    assert any(line.startswith(f"swin_test batch 2: {A}: ") for line in lines)
    assert json.loads(tuner.path.read_text())["models"][0]["model"] == "swin_test"
