"""Forms of layers with few rows: what is tried, that wrong ones are caught, the compile pool."""

from __future__ import annotations

import pytest
import torch

from fastswin.bench import attention_half_problems
from fastswin.bench.compile_ahead import CompilePool, compile_launches
from fastswin.bench.small_batch import SWIN_B, SWIN_T, stage_layers
from fastswin.bench.small_batch_chains import check, copies
from fastswin.bench.small_batch_forms import forms, predicted_us
from fastswin.bench.small_batch_layers import Form, Layer, Tensors
from fastswin.ops.linear.config import GemmConfig, OneShotConfig

CPU = torch.device("cpu")
TILES = {"one-shot": OneShotConfig(16, 32, 4), "tiled": GemmConfig(16, 16, 16, 4, 2)}


@pytest.mark.parametrize("layer", stage_layers(SWIN_T, 1), ids=lambda layer: str(layer.shape))
def test_candidates_begin_with_the_engines_own_forms(layer):
    found = list(forms(layer, 4))
    assert len(found) == len(set(found))
    new = [f for f in found if isinstance(f.config, OneShotConfig)]
    assert len(new) <= 4
    assert found[len(found) - len(new) :] == new
    assert all(f.pdl and f.kind == "fused" for f in new)
    assert all(predicted_us(layer, f.config, 132) > 1.8 for f in new)


def test_layers_of_a_model_are_the_deepest_stage_first():
    assert [layer.C for layer in stage_layers(SWIN_B, 1)[:5]] == [512] * 5
    assert {layer.C for layer in stage_layers(SWIN_T, 8)} == {384, 768}
    assert copies(Layer("qkv", 1, 14, 384)) == 40
    assert copies(Layer("fc1", 1, 7, 4096)) == 3  # 400 MiB hold no more


@pytest.mark.parametrize("name", ["qkv", "proj", "fc1", "fc2", "merge"])
def test_forms_are_right(name):
    layer = Layer(name, 1, 4, 16)
    tensors = Tensors(layer, CPU)
    assert check(tensors, Form("fused", TILES["one-shot"], False)) is None
    if name == "proj":
        assert check(tensors, Form("fused", TILES["tiled"], False)) is None


def test_wrong_forms_are_caught(monkeypatch):
    tensors, form = Tensors(Layer("qkv", 1, 4, 16), CPU), Form("library", None, False)
    oracle = tensors.reference

    def run(scale):
        return lambda form, weight: tensors.out.copy_(scale() * oracle(torch.float16))

    monkeypatch.setattr(tensors, "run", run(lambda: 1.1))
    assert check(tensors, form).startswith("error ")
    scales = iter([1.0, 1.0, 1.5])
    monkeypatch.setattr(tensors, "run", run(lambda: next(scales)))
    assert check(tensors, form) == "results differ from run to run"
    monkeypatch.setattr(tensors, "run", lambda form, weight: tensors.out[0].zero_())
    assert check(tensors, form) == "an output is not written, or not finite"


def word(job: str) -> str | None:
    """A stand-in for a compiler: fails as its job says."""
    if job == "raises":
        raise RuntimeError("the compiler crashed")
    return None if job == "compiles" else job


def test_a_pool_says_why_a_job_did_not_compile():
    pool: CompilePool[str] = CompilePool(1, word)
    for job in ("compiles", "too large", "raises", "compiles"):
        pool.start(job)
    try:
        assert len(pool) == 3
        assert pool.error("compiles", 60.0) is None
        assert pool.error("too large", 60.0) == "too large"
        assert "the compiler crashed" in str(pool.error("raises", 60.0))
    finally:
        pool.close()


def test_what_cannot_be_launched_is_told():
    def launch() -> None:
        raise ValueError("block_m must be 16, got 17")

    assert "block_m must be 16" in str(compile_launches(launch))
    assert compile_launches(lambda: None) is None


def test_halves_of_whole_models_are_among_those_swept():
    swept = {(half.model, half.batch) for half in attention_half_problems.HALVES}
    assert swept >= set(attention_half_problems.WHOLE_MODELS)
    for half in attention_half_problems.HALVES:
        tried = list(attention_half_problems.candidates(half))
        assert len(tried) == len(set(tried))
