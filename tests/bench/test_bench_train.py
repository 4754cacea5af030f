"""Training benchmarks: right gradients before any time, records, refusals, scaling."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

import pytest
import torch

from fastswin.bench import train, train_contenders, train_scaling, train_scaling_worker
from fastswin.bench.problems import Problem
from fastswin.bench.process_group import run_group
from fastswin.bench.roofline import Ceilings
from fastswin.bench.source import build_source
from fastswin.bench.train_scaling_group import FirstProcesses
from fastswin.bench.train_scaling_plan import ScalingPlan, add_options, read_plan
from fastswin.models import SwinConfig

CONFIG = SwinConfig(
    image_size=(32, 32), embed_dim=16, depths=(1, 2), num_heads=(1, 2), window_size=4, num_classes=5
)
VARIANTS = ["eager", "fastswin", "fastswin-bf16-stream"]


@pytest.fixture
def known_ceilings(monkeypatch, brief_timing):
    """No seconds spent on the copy and GEMM rates of this machine."""
    ceilings = Ceilings(0.01, {"fp32": 0.1, "bf16": 0.1})
    for module in (train, train_scaling):
        monkeypatch.setattr(module, "measure_device", lambda *a: ceilings)


@pytest.fixture
def problem():
    return Problem("tiny", "bf16", 2, config=CONFIG)


def test_records_of_every_contender(problem, tmp_path, known_ceilings):
    result = train.run([problem], VARIANTS, "cpu", tmp_path, seconds=0.05)
    assert result.problems_found == ()
    stored = json.loads(result.path.read_text())
    assert stored["suite"] == "train"
    assert {r["variant"] for r in stored["records"]} == set(VARIANTS)
    for record in stored["records"]:
        assert record["direction"] == "step"
        assert record["images_per_s"] == pytest.approx(2e3 / record["median_ms"], rel=1e-3)
        assert record["gradient_error"] <= record["gradient_gate"]
        assert record["stream_dtypes"] == ["bfloat16"] * 3
        assert record["allocator"] == "default"
    losses = {r["variant"]: r["first_loss"] for r in stored["records"]}
    assert losses["fastswin"] == pytest.approx(losses["eager"], rel=0.02)
    table = train.make_table(result.document)
    assert [row[3] for row in table.rows] == VARIANTS
    assert "residual stream" in table.header


def test_wrong_gradients_get_no_time(problem, tmp_path, known_ceilings, monkeypatch):
    build = train.build_trainee

    def wrong(variant, *arguments):
        trainee = build(variant, *arguments)
        if variant == "fastswin":
            with torch.no_grad():
                trainee.model.norm.weight.mul_(2)
        return trainee

    train.run([problem], ["fastswin"], "cpu", tmp_path, seconds=0.05)
    monkeypatch.setattr(train, "build_trainee", wrong)
    result = train.run([problem], ["eager", "fastswin"], "cpu", tmp_path, seconds=0.05)
    assert [line for line in result.problems_found if "fastswin: red: gradient error" in line]
    stored = json.loads(result.path.read_text())
    assert {r["variant"] for r in stored["records"]} == {"eager"}  # the older time is gone too


def test_fp16_scales_its_loss(problem):
    source = build_source(dataclasses.replace(problem, dtype="fp32"))
    images, labels = torch.randn(2, 3, 32, 32), torch.tensor([1, 3])
    cpu = torch.device("cpu")
    trainee = train_contenders.build_trainee("fastswin", source, "fp16", cpu, images)
    before = trainee.model.norm.weight.detach().clone()
    losses = [float(trainee.step(images, labels)) for _ in range(3)]
    assert trainee.scaler.is_enabled()
    assert not torch.equal(trainee.model.norm.weight, before)
    assert losses[-1] < losses[0]


def test_arguments_are_checked_before_anything_runs(problem, tmp_path):
    with pytest.raises(ValueError, match="variants must be among eager"):
        train.run([problem], ["apex"], "cpu", tmp_path)
    with pytest.raises(ValueError, match="dtype must be one of bf16"):
        train.run([dataclasses.replace(problem, dtype="tf32")], None, "cpu", tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert train.main(["--models", "swin_tinny", "--device", "cpu"]) == 2


def test_records_say_how_the_allocator_is_configured(monkeypatch):
    for name in train.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert train.allocator_settings() == "default"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert train.allocator_settings() == "expandable_segments:True"


def test_deadline_skips_with_a_line(problem, tmp_path, known_ceilings):
    result = train.run([problem], ["eager"], "cpu", tmp_path, seconds=0.05, deadline_s=0.0)
    assert result.document["records"] == []
    assert "deadline of 0 s passed" in result.problems_found[0]


def test_scaling_worker_alone(problem, tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        plan, reported = ScalingPlan(problem, [1], seconds=0.05), []
        found = train_scaling_worker.work(plan, torch.device("cpu"), reported.extend)
    finally:
        torch.distributed.destroy_process_group()
    assert found == reported
    assert [r["variant"] for r in found] == ["fastswin-none-1gpu"]
    assert found[0]["images_per_s"] == pytest.approx(2e3 / found[0]["median_ms"])


@pytest.mark.parametrize("apart", [0.0, 1e-7], ids=["equal", "apart"])
def test_scaling_sees_parameters_that_differ(problem, monkeypatch, apart):
    """The other process is a stand-in whose parameters are ours plus ``apart``."""
    dist = torch.distributed
    monkeypatch.setattr(dist, "new_group", lambda ranks: None)
    other = {dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum}
    monkeypatch.setattr(dist, "all_reduce", lambda t, op, group: t.copy_(other[op](t, t + apart)))
    group = FirstProcesses(2, torch.device("cpu"))
    assert group.same([torch.randn(3, 4), torch.randn(5)]) == (apart == 0.0)
    source = build_source(problem)
    images, labels = torch.randn(2, 3, 32, 32), torch.tensor([1, 3])
    trainee = train_contenders.build_trainee("fastswin", source, "fp32", group.device, images)
    trainee.step(images, labels)
    monkeypatch.setattr(group, "meet", lambda: None)
    monkeypatch.setattr(group, "agrees_to_go_on", lambda mine: False)
    if apart:
        with pytest.raises(RuntimeError, match="parameters of 2 processes differ"):
            train_scaling_worker.time_steps(trainee, images, labels, group, 0.01)
    else:
        assert len(train_scaling_worker.time_steps(trainee, images, labels, group, 0.01)) == 1
        steps = {int(state["step"]) for state in trainee.optimizer.state.values()}
        assert steps == {1 + train_scaling_worker.STEPS_PER_SAMPLE}  # not the step before


def test_scaling_plan_reaches_the_processes():
    """What the launcher writes on a command line is what a process reads from it."""
    named = Problem("swin_base_patch4_window7_224", "fp16", 3)
    plan = ScalingPlan(named, (1, 4, 2), "fastswin-graph", 0.25, ("graph", "ddp"))
    assert plan.processes == 4
    assert plan.runs == [(1, "none"), (2, "graph"), (4, "graph"), (2, "ddp"), (4, "ddp")]
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert read_plan(parser.parse_args(plan.words())) == plan


def test_scaling_efficiency_and_command(problem, tmp_path):
    rates = [{"gpus": 1, "images_per_s": 100.0}, {"gpus": 4, "images_per_s": 380.0}]
    assert [r["efficiency"] for r in train_scaling.with_efficiency(rates)] == [1.0, 0.95]
    assert train_scaling.with_efficiency(rates[1:])[0]["efficiency"] is None
    answer = tmp_path / "records.json"
    command = train_scaling.launch_command(ScalingPlan(problem, [1, 4]), answer)
    assert "--nproc-per-node=4" in command
    assert command[command.index("--answer") + 1] == str(answer)
    assert command[command.index("--gpus") + 1] == "1,4"
    assert command[command.index("--batch") + 1] == "2"
    assert command[command.index("--averaging") + 1] == "ddp"
    with pytest.raises(ValueError, match="averaging must be of ddp, graph, got"):
        ScalingPlan(problem, [1], averaging=["mean"])
    with pytest.raises(ValueError, match="variant must end with -graph"):
        train_contenders.build_trainee(
            "fastswin", build_source(problem), "fp32", torch.device("cpu"),
            torch.randn(2, 3, 32, 32), "group",
        )  # fmt: skip


def test_scaling_processes_get_the_environment_and_an_end(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    python = [sys.executable, "-c"]
    set_there = "import os; assert os.environ['NCCL_NVLS_ENABLE'] == '0'"
    assert run_group([*python, set_there], 30.0) is None
    failed = run_group([*python, "raise ValueError('no card')"], 30.0)
    assert failed == "failed: ValueError: no card"


def test_scaling_processes_that_hang_say_where():
    """As ``tell_stacks_on_termination`` does, without waiting for an import of torch."""
    script = (
        "import faulthandler, signal, time\n"
        "faulthandler.register(signal.SIGTERM, chain=True)\n"
        "def wait_for_the_other_card(): time.sleep(60)\n"
        "wait_for_the_other_card()"
    )
    watched, lines = [], []
    slow = run_group(
        [sys.executable, "-c", script], 1.5, lines.append, lambda: watched.append(True)
    )
    assert slow == "not done after 2 s"
    assert watched
    assert "wait_for_the_other_card" in "".join(lines)


@pytest.mark.gpu
def test_train_suite_on_a_gpu(tmp_path):
    problem = Problem("swin_tiny_patch4_window7_224", "bf16", 16)
    result = train.run([problem], ["eager", "fastswin-graph"], "cuda", tmp_path, seconds=1.0)
    assert result.problems_found == ()
    times = {r["variant"]: r for r in result.document["records"]}
    assert times["fastswin-graph"]["median_ms"] < times["eager"]["median_ms"]
    assert times["fastswin-graph"]["peak_mib"] < times["eager"]["peak_mib"]
    assert times["fastswin-graph"]["stream_dtypes"] == times["eager"]["stream_dtypes"]
