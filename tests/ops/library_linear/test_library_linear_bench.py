"""The probe of the library's kernels, with the kernels and the clock stood in for."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

from fastswin import ops
from fastswin.bench import op_library_linear as bench
from fastswin.bench.op_library_linear_problems import (
    FP16,
    PROBE,
    VARIANTS_OF,
    Inputs,
    Layer,
    Variant,
    layers,
    probe_variants,
)
from fastswin.bench.op_library_linear_results import Result, summary
from fastswin.ops.library_linear.library import LibraryLinearError
from fastswin.ops.library_linear.problem import FP8

LAYER = Layer("tiny", "any", 24, 48, 32)
PROBED = {v.name: v for v in probe_variants()}
USED = {f"{kind} {v.name}": v for kind, variants in VARIANTS_OF.items() for v in variants}


def as_reference(**arguments):
    return ops.library_linear(**(arguments | {"impl": "reference", "config": None}))


def wrong_by_one_column(**arguments):
    y = as_reference(**arguments)
    y[:, -1] = y[:, 0]
    return y


def left_unwritten(**arguments):
    as_reference(**(arguments | {"out": arguments["out"].clone()}))
    return arguments["out"]


def refused(**arguments):
    raise LibraryLinearError("no algorithm: CUBLAS_STATUS_NOT_SUPPORTED (15)", 15)


@pytest.fixture
def stand_in(monkeypatch):
    """``examine`` on a CPU: two algorithms, the second slower."""

    def use(function):
        plan = types.SimpleNamespace(algorithms=[0, 1], describe=lambda index: {"id": index})
        times = iter([4.0, 5.0, 8.0] * 100)
        monkeypatch.setattr(bench, "library_linear", function)
        monkeypatch.setattr(bench._Call, "plan", lambda self: plan)
        monkeypatch.setattr(bench, "_time_us", lambda call, layer: next(times))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    return use


@pytest.mark.parametrize("variant", PROBED.values(), ids=PROBED.keys())
def test_right_answers_pass_in_every_format(stand_in, variant):
    stand_in(as_reference)
    result = bench.examine(Inputs.make(LAYER, torch.device("cpu")), variant)
    assert result.notes == {}
    assert result.best == (0, 4.0)
    assert result.contender_us == 8.0
    assert "4.00 us #0/2" in result.line()
    assert "= 2.00x" in result.line()
    assert result.record()["latency_us"] == [4.0, 5.0]


@pytest.mark.parametrize("function", [wrong_by_one_column, left_unwritten])
@pytest.mark.parametrize("name", ["fc2 fp16 bias+res", "fc1 fp8 bias+gelu >fp8", "qkv fp8 bias"])
def test_wrong_answers_get_no_time(stand_in, function, name):
    stand_in(function)
    result = bench.examine(Inputs.make(LAYER, torch.device("cpu")), USED[name])
    assert result.latency_us == [None, None]
    assert result.best is None
    assert "wrong: rms" in result.line()


def test_varying_answers_get_no_time(stand_in):
    noise = iter(range(1, 100))

    def vary(**arguments):
        return as_reference(**arguments).mul_(1 + next(noise) * 2**-8)

    stand_in(vary)
    result = bench.examine(Inputs.make(LAYER, torch.device("cpu")), USED["qkv fp16 bias"])
    assert set(result.notes.values()) == {"ArithmeticError: runs differ"}


def test_refused_variant_is_named_and_the_rest_goes_on(stand_in, monkeypatch):
    stand_in(as_reference)

    def no_plan(self):
        refused()

    monkeypatch.setattr(bench._Call, "plan", no_plan)
    result = bench.examine(Inputs.make(LAYER, torch.device("cpu")), USED["fc2 fp8 res"])
    assert "NOT_SUPPORTED (15)" in result.line()
    assert result.contender_us == 4.0
    assert result.record()["error"].startswith("LibraryLinearError: no algorithm")


def test_summary_adds_a_block_up_and_shows_gaps():
    def result(case, kind, us):
        return [
            Result(dataclasses.replace(LAYER, case=case, kind=kind), v, [us], contender_us=2 * us)
            for v in VARIANTS_OF[kind]
        ]

    kinds = ("qkv", "proj", "fc1", "fc2")
    whole = [r for us, kind in enumerate(kinds, 1) for r in result("T1 b1", kind, us)]
    part = [r for kind in kinds[:3] for r in result("T2 b1", kind, 1.0)]
    first, second = (line.split() for line in summary([*whole, *part]))
    assert first[:6] == ["T1", "b1", "block:", "fp16", "torch", "20.0"]
    assert first.count("10.0") == 3
    assert second.count("-") == 4
    assert "us" not in second


def test_probe_takes_every_combination():
    found = list(probe_variants())
    assert len({v.name for v in found}) == len(found) == 28
    assert sum(v.out_dtype == FP8 for v in found) == 4
    assert Variant("fp8 bias+gelu >fp8", FP8, FP8, gelu=True) in found
    assert (PROBE.K % 16, PROBE.N % 16) == (0, 0)


def test_layers_are_those_of_the_models():
    found = list(layers(["T", "L"], [2]))
    assert len(found) == 2 * 4 * 4
    assert found[0] == Layer("T1 b2", "qkv", 2 * 56 * 56, 288, 96)
    assert found[-1] == Layer("L4 b2", "fc2", 2 * 7 * 7, 1536, 6144)


def test_half_precision_inputs_are_those_of_fp8():
    """One fp32 answer serves all formats."""
    inputs = Inputs.make(dataclasses.replace(LAYER, K=96), torch.device("cpu"))
    assert torch.equal(inputs.scaled_weight(FP16).float(), inputs.weight.float() * inputs.factor)
    assert torch.equal(inputs.x.half().float(), inputs.x.float())
    assert 0.5 < inputs.product.std().item() < 2


def test_layers_use_combinations_that_are_probed():
    """The names are shorter, the combinations the same."""
    probed = {dataclasses.replace(v, name="") for v in PROBED.values()}
    assert {dataclasses.replace(v, name="") for v in USED.values()} <= probed


def test_command_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--models", "T"]) == 2
    assert "cannot run: there is no GPU" in capsys.readouterr().out
