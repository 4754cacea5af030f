"""Candidates: legal, the heuristic's first, few enough to compile in minutes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fastswin.bench.tune_units import stage_problems, tuning_group
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.models import VARIANTS, find_variant
from fastswin.ops.hopper_gemm.config import CHOSEN, HopperGemmConfig
from fastswin.ops.linear.config import GemmConfig
from fastswin.ops.window_attention.config import RUN_PROGRAMS
from fastswin.tuning.card import H100
from fastswin.tuning.layers import CHOICES, mlp_layer, qkv_layer
from fastswin.tuning.problem import make_problem
from fastswin.tuning.space import candidates, default_for, operand_bytes, why_invalid

#: T4, A100, RTX 3090, H100.
CARDS = {
    "sm75": dataclasses.replace(H100, multiprocessors=40, capability=(7, 5), shared_bytes=65536),
    "sm80": dataclasses.replace(H100, multiprocessors=108, capability=(8, 0), shared_bytes=166912),
    "sm86": dataclasses.replace(H100, multiprocessors=82, capability=(8, 6), shared_bytes=101376),
    "sm90": H100,
}


CPU = torch.device("cpu")


def plan_of(name, batch, precision="fp16", **options):
    """The plan on a stand-in for an H100."""
    config = find_variant(name)
    size = config.image_size
    return make_plan(config, batch, size, CPU, PRECISIONS[precision], "triton", **options)


def group_of(name, batch, precision="fp16", **options):
    return tuning_group(find_variant(name), plan_of(name, batch, precision, **options), precision)


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS.keys())
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_base_window16_256"])
@pytest.mark.parametrize("batch", [1, 32])
def test_candidates_are_legal_and_start_with_the_heuristic(name, batch, card):
    kernels, _ = group_of(name, batch, fused_attention={})
    for problem in kernels:
        found = candidates(problem, card)
        default = default_for(problem, card)
        assert found[:1] == ([] if default is None else [default])
        assert len(found) == len(set(found))
        for config in found[1:]:
            assert why_invalid(problem, config, card.capability) is None
            assert operand_bytes(problem, config) <= card.shared_bytes


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swin_large_patch4_window12_384"])
def test_a_model_needs_a_few_thousand_binaries_at_most(name):
    binaries = set()
    for batch in (1, 2, 4, 8, 16, 32, 64):
        kernels, _ = group_of(name, batch, fused_attention={})
        for problem in kernels:
            found = candidates(problem, H100)
            assert len(found) <= 70, str(problem)
            binaries |= {(problem.kernel, config) for config in found}
    assert 300 < len(binaries) < 1500


def test_every_named_variant_can_be_listed():
    for name, config in VARIANTS.items():
        kernels, layers = group_of(name, 1, "bf16", fused_attention={})
        attention = [k for k in kernels if k.op == "window_attention"]
        assert attention
        assert len(layers) == 2 * config.num_stages
        assert all(candidates(problem, H100) for problem in attention)


def test_fp32_has_attention_alone():
    kernels, layers = group_of("swin_tiny_patch4_window7_224", 1, "tf32")
    assert ({k.op for k in kernels}, layers) == ({"window_attention"}, [])


def test_what_no_table_decides_is_not_searched():
    """Stages of few rows, layers inside an attention kernel, attention of three TF32 products."""
    name = "swin_tiny_patch4_window7_224"
    assert group_of(name, 1, pdl=True) == ([], [])
    plan, config = plan_of(name, 8), find_variant(name)
    assert [s.attention for s in plan.stages] == ["fused", "fused", "triton", "triton"]
    asked = [stage_problems(config, plan, stage, "fp16") for stage in range(4)]
    assert [set(a.layers) for a in asked] == [{"mlp"}, {"mlp"}, {"qkv", "mlp"}, {"qkv", "mlp"}]
    assert [a.attention is None for a in asked] == [True, True, False, False]
    wide = plan_of(name, 32, "fp32")
    split = [s.split_attention for s in wide.stages]
    assert True in split
    asked = [stage_problems(config, wide, stage, "fp32") for stage in range(4)]
    assert [a.attention is None for a in asked] == split


def test_the_heuristics_time_is_that_of_what_the_engine_runs():
    """The Hopper product for fc1 and qkv, and runs of windows, are the engine's own choice."""
    fc1 = make_problem("linear", "fp16", 6272, N=1536, K=384, gelu=1, residual=0)
    assert candidates(fc1, H100)[0] == CHOSEN["linear", 384]
    few = dataclasses.replace(fc1, rows=1024)  # 96 tiles: too few for its warp groups
    assert isinstance(candidates(few, H100)[0], GemmConfig)
    assert isinstance(candidates(fc1, CARDS["sm80"])[0], GemmConfig)
    qkv = make_problem("linear", "fp16", 6272, N=1152, K=384, gelu=0, residual=0)
    assert candidates(qkv, H100)[0] == CHOSEN["plain", 384]
    narrow = make_problem("linear", "fp16", 100352, N=288, K=96, gelu=0, residual=0)
    found = candidates(narrow, H100)
    assert isinstance(found[0], GemmConfig)
    assert any(isinstance(config, HopperGemmConfig) for config in found)
    for changes, why in (({"shape": (1536, 384, 0, 1)}, "adds no residual"),
                         ({"dtype": "tf32"}, "takes half precision"),
                         ({"shape": (1536, 388, 1, 0)}, "not a positive multiple")):  # fmt: skip
        other = dataclasses.replace(fc1, **changes)
        assert why in why_invalid(other, CHOSEN["linear", 384], (9, 0))
    assert "needs compute capability 9.0" in why_invalid(fc1, CHOSEN["linear", 384], (10, 0))
    attention = {"window_h": 7, "window_w": 7, "heads": 3, "head_dim": 32}
    many = make_problem("window_attention", "fp16", 4096, **attention, cosine=0)
    assert candidates(many, H100)[0].programs == RUN_PROGRAMS
    assert candidates(make_problem("window_attention", "fp16", 4096, **attention, cosine=1),
                      H100)[0].programs == 0  # fmt: skip
    longer = attention | {"window_h": 12, "cosine": 0}
    long = make_problem("window_attention", "fp16", 4096, **longer)
    config = dataclasses.replace(default_for(long, H100), programs=396)
    assert "need windows of at most 64 tokens" in why_invalid(long, config, (9, 0))


def test_forms_are_the_planners_words():
    for layer in (qkv_layer("fp16", 3136, 96, False), mlp_layer("fp16", 3136, 96, 384, False)):
        assert set(layer.forms()) == set(CHOICES[layer.layer])


def test_post_norm_has_no_layer_norm_in_front():
    assert set(qkv_layer("fp16", 3136, 96, True).forms()) == {"library", "tiled"}
    assert set(mlp_layer("fp16", 3136, 96, 384, True).forms()) == {"fused", "library", "unfused"}
    assert all(len(f) == 1 for f in qkv_layer("fp16", 3136, 96, True).forms().values())


@pytest.mark.parametrize(
    ("op", "dims", "message"),
    [
        ("conv", {}, "op must be one of"),
        ("mlp", {"C": 96}, "the shape of mlp is C, hidden, post_norm; got C"),
    ],
    ids=["op", "dims"],
)
def test_problems_name_what_is_wrong(op, dims, message):
    with pytest.raises(ValueError, match=message):
        make_problem(op, "fp16", 1, **dims)
    with pytest.raises(ValueError, match="dtype must be one of fp32, tf32"):
        make_problem("gelu", "int8", 1, C=96)
