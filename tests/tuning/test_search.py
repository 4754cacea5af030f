"""The search: what is right is timed, what is wrong is rejected by name, the table continues."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch

from fastswin.bench import tune, tune_search
from fastswin.bench.timing import HostClock
from fastswin.bench.tune import Tuner
from fastswin.bench.tune_launch import make_bench
from fastswin.bench.tune_models import parse_batches, parse_models, tune_models
from fastswin.bench.tune_search import make_check, search
from fastswin.bench.tune_select import MOST_LOSS
from fastswin.bench.tune_units import tuning_group
from fastswin.bench.tune_whole import heuristic_plan
from fastswin.engine import Engine
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.models import SwinConfig, find_variant
from fastswin.ops.mlp.config import MlpConfig
from fastswin.tuning.card import card_of
from fastswin.tuning.document import TableRefusedError
from fastswin.tuning.problem import make_problem
from fastswin.tuning.space import candidates
from fastswin.tuning.table import TuningTable

CPU = torch.device("cpu")
SMALL = (MlpConfig(16, 16, 4, 1), MlpConfig(32, 16, 4, 1))
MLP = make_problem("mlp", "fp16", 40, C=16, hidden=32, post_norm=0)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One launch a sample: the interpreter takes its time."""
    for name in ("MIN_LAUNCHES", "MAX_LAUNCHES", "FIRST_SAMPLES", "FINAL_SAMPLES"):
        monkeypatch.setattr(tune_search, name, 1)


@pytest.fixture
def first_candidates(monkeypatch):
    """The heuristic's choice and the next one."""
    listed = tune.candidates
    monkeypatch.setattr(tune, "candidates", lambda problem, card: listed(problem, card)[:2])


PROBLEMS = {
    "linear-gelu": make_problem("linear", "fp16", 20, N=32, K=48, gelu=1, residual=0),
    "linear-residual": make_problem("linear", "fp16", 20, N=32, K=48, gelu=0, residual=1),
    "layer_norm_linear": make_problem("layer_norm_linear", "fp16", 20, N=48, K=16, gelu=0),
    "mlp": MLP,
    "mlp-v2": make_problem("mlp", "fp16", 20, C=16, hidden=32, post_norm=1),
    "attention": make_problem(
        "window_attention", "fp16", 4, window_h=3, window_w=4, heads=2, head_dim=16, cosine=0
    ),
    "attention-v2": make_problem(
        "window_attention", "fp32", 5, window_h=4, window_w=4, heads=2, head_dim=16, cosine=1
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_every_operator_is_right_under_its_heuristic(problem):
    config = SMALL[0] if problem.op == "mlp" else None  # the heuristic's tiles are an H100's
    assert make_check(make_bench(problem, CPU))(config) is None


def test_the_fastest_right_configuration_is_found():
    found = search(make_bench(MLP, CPU), SMALL, HostClock(), SMALL[0])
    assert found.config in SMALL
    assert found.rejected == ()
    assert 0 < found.latency_us <= found.default_us


class FaultyBench:
    """A bench whose launches go wrong in one way under one configuration."""

    def __init__(self, fault, config):
        self.bench, self.fault, self.config = make_bench(MLP, CPU), fault, config
        self.problem, self.out = self.bench.problem, self.bench.out
        self.checked, self.reference = self.bench.checked, self.bench.reference
        self.launches = 0

    def launch(self, config):
        out = self.bench.launch(config)
        if config == self.config:
            self.launches += 1
            if self.fault == "raises":
                raise RuntimeError("out of resource: shared memory")
            if self.fault == "unwritten":
                out[-1, -1] = math.nan
            elif self.fault == "varies" and self.launches == 3:
                out[3, 3] += 0.001
            elif self.fault == "wrong":
                out[5] *= 1.01
        return out


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raises", "out of resource: shared memory"),
        ("unwritten", "an output is not written, or not finite"),
        ("varies", "results differ from run to run"),
        ("wrong", "exceeds"),
    ],
)
def test_wrong_candidates_are_rejected_and_named(fault, reason):
    bench = FaultyBench(fault, SMALL[1])
    found = search(bench, SMALL, HostClock(), SMALL[0])
    assert found.config == SMALL[0]
    assert [config for config, _ in found.rejected] == [SMALL[1]]
    assert reason in found.rejected[0][1]
    with pytest.raises(RuntimeError, match="no configuration is right"):
        search(FaultyBench(fault, SMALL[1]), SMALL[1:], HostClock(), SMALL[0])


class ScriptedClock(HostClock):
    """Each sample takes the next of a list of times."""

    def __init__(self, times_ms):
        super().__init__()
        self.times_ms = iter(times_ms)

    def elapsed_ms(self, call, calls):
        return next(self.times_ms) * calls


@pytest.mark.parametrize(
    ("times_ms", "winner"),
    [([1.0, 1.0, 1.0, 0.995, 0.995, 1.0], 0), ([1.0, 1.0, 1.0, 0.9, 0.9, 1.0], 1)],
    ids=["within-noise", "faster"],
)
def test_the_heuristic_stays_unless_it_is_clearly_beaten(times_ms, winner):
    # two pilots, one sample each, then each again, the faster first
    found = search(make_bench(MLP, CPU), SMALL, ScriptedClock(times_ms), SMALL[0])
    assert found.config == SMALL[winner]


def test_a_hopeless_candidate_is_not_timed_further():
    clock = ScriptedClock([1.0, 2.0, 1.0, 1.0])  # two pilots, then the other's two samples
    assert search(make_bench(MLP, CPU), SMALL, clock, SMALL[0]).config == SMALL[0]
    assert next(clock.times_ms, None) is None


TINY = SwinConfig(
    image_size=(16, 32), embed_dim=32, depths=(2,), num_heads=(1,), window_size=4, num_classes=5
)


def tiny_group():
    plan = make_plan(TINY, 1, TINY.image_size, CPU, PRECISIONS["fp16"], "triton")
    return tuning_group(TINY, plan, "fp16")


def run_tuner(path, card, compiler, group=None, deadline_s=600.0):
    deadline = time.monotonic() + deadline_s
    tuner = Tuner(path, card, CPU, HostClock(), compiler, "3.8.0", deadline)
    groups = [group or tiny_group()]
    tuner.start(groups)
    return tuner.run(groups)


def test_a_tuned_model_is_a_table_that_continues(card, compiler, first_candidates, tmp_path):
    path = tmp_path / "table.json"
    _, layers = tiny_group()
    layers = [layer for layer in layers if layer.layer == "qkv"]
    kernels = list(dict.fromkeys(k for form in layers[0].forms().values() for k in form))
    first = run_tuner(path, card, compiler, (kernels, layers))
    tuned = [k for k in kernels if tune.candidates(k, card)]
    assert (first.tuned, first.known, first.left, first.rejected) == (len(tuned), 0, 0, ())
    assert set(compiler.started) == {(k, c) for k in tuned for c in tune.candidates(k, card)}
    assert compiler.cancelled
    document = json.loads(path.read_text())
    assert document == first.document
    table = TuningTable(document, card, "3.8.0", path.name)
    assert table.describe() == f"table.json, {len(tuned) + len(layers)} rows"
    for kernel in tuned:
        assert table.config(kernel) in tune.candidates(kernel, card)
    for layer in layers:
        choice = table.choice(layer)
        assert choice["choice"] == min(choice["latency_us"], key=choice["latency_us"].get)
        assert set(choice["latency_us"]) == set(layer.forms())

    second = run_tuner(path, card, compiler, (kernels, layers))
    assert (second.tuned, second.known, second.left) == (0, len(tuned), 0)
    assert second.document == first.document


def test_a_deadline_leaves_a_whole_table_and_says_what_is_left(card, compiler, tmp_path):
    result = run_tuner(tmp_path / "table.json", card, compiler, deadline_s=-1.0)
    kernels, _ = tiny_group()
    assert (result.tuned, result.left) == (0, len(kernels))
    assert json.loads((tmp_path / "table.json").read_text())["configs"] == []
    compiler.never = True
    result = run_tuner(tmp_path / "table.json", card, compiler)
    assert result.tuned == 0
    assert result.left == sum(bool(tune.candidates(k, card)) for k in kernels)


def test_candidates_that_do_not_compile_are_reported(card, compiler, first_candidates, tmp_path):
    problem = make_problem("mlp", "fp16", 16, C=32, hidden=128, post_norm=0)
    broken = tune.candidates(problem, card)[0]
    compiler.fails = {broken: "300000 bytes of shared memory exceed the card's 232448"}
    result = run_tuner(tmp_path / "table.json", card, compiler, ([problem], []))
    (line,) = result.rejected
    assert "not compiled: 300000 bytes" in line
    (row,) = result.document["configs"]
    assert row["default_us"] is None  # the heuristic's own choice was the one that failed
    assert MlpConfig(**row["config"]) != broken


def test_a_table_of_another_card_is_not_overwritten(card, compiler, tmp_path):
    path = tmp_path / "table.json"
    text = json.dumps({"schema": 2, "card": "Other", "capability": [9, 0], "models": [],
                       "configs": [], "choices": []})  # fmt: skip
    path.write_text(text)
    with pytest.raises(TableRefusedError, match="was measured on Other"):
        run_tuner(path, card, compiler)
    assert path.read_text() == text


def test_batches_are_ranges_of_the_ladder_or_lists():
    assert parse_batches("1-64") == [1, 2, 4, 8, 16, 32, 64]
    assert parse_batches("3-20,24") == [4, 8, 16, 24]
    for text in ("0", "a", "1-", "", "5-7"):
        with pytest.raises(ValueError, match="batches"):
            parse_batches(text)


def test_models_may_have_batches_of_their_own():
    tiny, small = "swin_tiny_patch4_window7_224", "swin_small_patch4_window7_224"
    cases = parse_models([tiny, f"{small}:64:8"], [1, 8, 32])
    assert cases == [(tiny, 32), (tiny, 8), (small, 8), (small, 64), (tiny, 1)]
    with pytest.raises(ValueError, match="must look like NAME:8:32"):
        parse_models([f"{tiny}:0"], [1])
    with pytest.raises(ValueError, match="swin_tny"):
        parse_models(["swin_tny:8"], [1])


def test_workers_are_counted_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        tune_models(["swin_tiny_patch4_window7_224"], [1], "fp16", tmp_path / "t.json", workers=0)


def test_tuning_without_a_gpu_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs an NVIDIA GPU"):
        tune_models(["swin_tiny_patch4_window7_224"], [1], "fp16", tmp_path / "t.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_a_model_is_tuned_on_the_card_and_gets_no_slower(tmp_path):
    """Real compilation processes, CUDA graphs, then the engine with the table it wrote.

    Batch 8, for at batch 1 all stages of Swin-T have few rows and nothing is searched.
    """
    path, name = tmp_path / "table.json", "swin_tiny_patch4_window7_224"
    result, (compared,) = tune_models([name], [8], "fp16", path, workers=12, deadline_s=90.0)
    assert result.left == 0
    device, config = torch.device("cuda"), find_variant(name)
    launches, _ = tuning_group(config, heuristic_plan(config, 8, "fp16", device), "fp16")
    searched = [launch for launch in launches if candidates(launch, card_of(device))]
    assert result.tuned == len(searched) > 0
    assert not [line for line in result.rejected if "differ from run to run" in line]
    assert compared.message == ""
    assert compared.tuned_ms <= compared.heuristic_ms / (1 - MOST_LOSS)
    assert compared.max_abs_diff < 0.05
    engines = [Engine(name, pretrained=False, tuning=table) for table in (path, "off")]
    plans = [engine.report(batch=8).plan for engine in engines]
    assert (plans[0] != plans[1]) == (compared.units > 0)
    assert "ms by heuristics" in engines[0].report(batch=8).tuning
    nothing, _ = tune_models([name], [1], "fp16", path, deadline_s=60.0, compare=False)
    assert (nothing.tuned, nothing.left) == (0, 0)
