"""Candidates: legal, the heuristic's first, few enough to compile in minutes."""

from __future__ import annotations

import dataclasses

import pytest

from fastswin.bench.tune import tuning_group
from fastswin.models import VARIANTS, find_variant
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


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS.keys())
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_base_window16_256"])
@pytest.mark.parametrize("batch", [1, 32])
def test_candidates_are_legal_and_start_with_the_heuristic(name, batch, card):
    kernels, _ = tuning_group([find_variant(name)], batch, "fp16")
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
        kernels, _ = tuning_group([find_variant(name)], batch, "fp16")
        for problem in kernels:
            found = candidates(problem, H100)
            assert len(found) <= 120, str(problem)
            binaries |= {(problem.kernel, config) for config in found}
    assert 300 < len(binaries) < 2500


def test_every_named_variant_can_be_listed():
    for config in VARIANTS.values():
        kernels, layers = tuning_group([config], 1, "bf16")
        attention = [k for k in kernels if k.op == "window_attention"]
        assert attention
        assert len(layers) == 2 * config.num_stages
        assert all(candidates(problem, H100) for problem in attention)


def test_fp32_has_attention_alone():
    kernels, layers = tuning_group([find_variant("swin_tiny_patch4_window7_224")], 1, "tf32")
    assert ({k.op for k in kernels}, layers) == ({"window_attention"}, [])


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
