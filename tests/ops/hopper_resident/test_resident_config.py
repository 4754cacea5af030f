"""Limits, memory, choices and refusals of the resident kernels, without a card."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fastswin import ops
from fastswin.ops.hopper_resident import config as resident
from fastswin.ops.hopper_resident.config import ResidentMlpConfig, ResidentProductConfig
from fastswin.ops.linear.config import GemmConfig, LayerNormLinearConfig
from fastswin.ops.mlp.config import MlpConfig
from fastswin.tuning.card import H100
from fastswin.tuning.problem import config_from_dict, config_to_dict, make_problem
from fastswin.tuning.space import candidates, operand_bytes, why_invalid

CPU = torch.device("cpu")
PRODUCT, MLP = ResidentProductConfig(), ResidentMlpConfig()

#: Of 128 channels.
WIDE_MLP = ResidentMlpConfig(32)

#: Swin-T's first stage: rows at batch 32.
ROWS = 100352


@pytest.mark.parametrize(
    ("config", "N", "C", "reason"),
    [
        (PRODUCT, 288, 96, None),
        (PRODUCT, 384, 128, None),  # 224 KiB to the byte
        (ResidentProductConfig(32, 3, 1), 32, 96, None),
        (ResidentProductConfig(128), 288, 96, "block_n must be 32 or 64, got 128"),
        (ResidentProductConfig(16), 288, 96, "block_n must be 32 or 64, got 16"),
        (ResidentProductConfig(groups=2), 288, 96, "groups must be 3 or 4, got 2"),
        (ResidentProductConfig(groups=5), 288, 96, "groups must be 3 or 4, got 5"),
        (ResidentProductConfig(buffers=0), 288, 96, "buffers must be at least 1, got 0"),
        (PRODUCT, 284, 96, "284 columns are not a multiple of 8 of at least 64"),
        (PRODUCT, 56, 96, "56 columns are not a multiple of 8 of at least 64"),
        (PRODUCT, 392, 128, "245760 bytes of shared memory exceed 229376"),
        (PRODUCT, 192, 64, "rows must have 96 or 128 channels, got 64"),
        (PRODUCT, 64, 192, "rows must have 96 or 128 channels, got 192"),
    ],
    ids=str,
)
def test_what_a_product_needs(config, N, C, reason):
    assert resident.product_blocker(config, N, C) == reason


@pytest.mark.parametrize(
    ("config", "hidden", "C", "reason"),
    [
        (MLP, 384, 96, None),
        (WIDE_MLP, 512, 128, None),
        (MLP, 512, 128, "registers hold no 64 hidden units beside 128 channels"),
        (ResidentMlpConfig(32), 32, 96, None),
        (ResidentMlpConfig(128), 384, 96, "block_h must be 32 or 64, got 128"),
        (ResidentMlpConfig(16), 384, 96, "block_h must be 32 or 64, got 16"),
        (MLP, 352, 96, "352 hidden channels are not a positive multiple of 64"),
        (MLP, 0, 96, "0 hidden channels are not a positive multiple of 64"),
        (MLP, 256, 64, "rows must have 96 or 128 channels, got 64"),
        (MLP, 768, 192, "rows must have 96 or 128 channels, got 192"),
    ],
    ids=str,
)
def test_what_an_mlp_needs(config, hidden, C, reason):
    assert resident.mlp_blocker(config, hidden, C) == reason


def test_shared_memory_by_hand():
    # 5 steps of 64 columns; 4 groups of 64 rows with two buffers of 64 columns
    assert PRODUCT.shared_bytes(288, 96) == 2 * (320 * 96 + 4 * 64 * (96 + 128)) == 176128
    three = ResidentProductConfig(32, 3, 1)
    assert three.shared_bytes(288, 96) == 2 * (288 * 96 + 3 * 64 * (96 + 32)) == 104448
    # both weights whole, rows and results of three groups
    assert MLP.shared_bytes(384, 96) == 2 * (2 * 384 * 96 + 3 * 64 * 2 * 96) == 221184
    # 256 of 512 hidden units at a time
    assert WIDE_MLP.shared_bytes(512, 128) == 2 * (2 * 256 * 128 + 3 * 64 * 2 * 128) == 229376


@pytest.mark.parametrize(
    ("config", "hidden", "C", "stages"),
    [
        (MLP, 384, 96, 6), (WIDE_MLP, 384, 96, 12), (WIDE_MLP, 512, 128, 8),
        (WIDE_MLP, 64, 128, 2), (MLP, 448, 96, 6),
    ],
    ids=str,
)  # fmt: skip
def test_steps_that_a_program_holds(config, hidden, C, stages):
    assert config.stages(hidden, C) == stages
    assert config.shared_bytes(hidden, C) <= resident.RESIDENT_BYTES


def test_rows_from_which_a_product_is_taken():
    least = 132 * resident.PRODUCT_ROWS_EACH
    assert resident.default_resident_product(least, 288, 96, 132) == PRODUCT
    assert resident.default_resident_product(least - 1, 288, 96, 132) is None
    assert resident.default_resident_product(least, 288, 96, 133) is None
    assert resident.default_resident_product(ROWS, 384, 128, 132) == PRODUCT
    assert resident.default_resident_product(ROWS, 576, 192, 132) is None


def test_rows_from_which_an_mlp_is_taken():
    """From a number of rows on, where rounds of three tiles for each program are nearly full."""
    whole_round = 64 * 3 * 132
    assert resident.default_resident_mlp(resident.MLP_ROWS, 384, 96, 132) == MLP
    assert resident.default_resident_mlp(resident.MLP_ROWS - 1, 384, 96, 132) is None
    assert resident.default_resident_mlp(ROWS, 384, 96, 132) == MLP
    assert resident.default_resident_mlp(ROWS, 768, 192, 132) is None
    for hidden, C, config in ((384, 96, MLP), (512, 128, WIDE_MLP)):
        assert resident.default_resident_mlp(whole_round, hidden, C, 132) == config
        assert resident.default_resident_mlp(whole_round + 1, hidden, C, 132) is None
        assert resident.default_resident_mlp(2 * whole_round, hidden, C, 132) == config
    # weights that come again for every round do not pay for a part of one
    assert resident.default_resident_mlp(resident.MLP_ROWS, 512, 128, 132) is None


@pytest.fixture
def hopper_card(monkeypatch):
    """A GPU of compute capability 9.0, as far as choices go."""
    monkeypatch.setattr(resident, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(resident, "multiprocessor_count", lambda device: 132)
    monkeypatch.setattr(resident, "gluon_blocker", lambda: None)
    return torch.device("cuda", 0)


def test_what_the_gpu_at_hand_takes(hopper_card, monkeypatch):
    half = torch.float16
    assert resident.chosen_product(ROWS, 288, 96, half, hopper_card) == PRODUCT
    assert resident.chosen_mlp(ROWS, 384, 96, half, hopper_card) == MLP
    assert resident.chosen_product(ROWS, 288, 96, torch.float32, hopper_card) is None
    assert resident.chosen_mlp(ROWS, 384, 96, torch.float32, hopper_card) is None
    assert "float16 or bfloat16" in resident.why_no_resident(hopper_card, torch.float32)
    monkeypatch.setattr(resident, "gluon_blocker", lambda: "this Triton lacks Gluon: x")
    assert resident.why_no_resident(hopper_card, half) == "this Triton lacks Gluon: x"
    assert resident.chosen_mlp(ROWS, 384, 96, half, hopper_card) is None


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)], ids=str)
def test_other_generations_are_refused_by_name(capability, hopper_card, monkeypatch):
    monkeypatch.setattr(resident, "device_capability", lambda device: capability)
    reason = resident.why_no_resident(hopper_card, torch.float16)
    assert "9.0" in reason
    assert str(capability) in reason
    assert resident.chosen_product(ROWS, 288, 96, torch.float16, hopper_card) is None
    assert resident.chosen_mlp(ROWS, 384, 96, torch.float16, hopper_card) is None


def linear_on_cpu(**options):
    x, w = torch.randn(70, 96).half(), torch.randn(288, 96).half()
    return ops.linear(x, w, **{"layer_norm_eps": 1e-5, "config": PRODUCT, **options})


def mlp_on_cpu(**options):
    x, fc1, fc2 = torch.randn(70, 96).half(), torch.randn(384, 96).half(), torch.randn(96, 384)
    return ops.mlp(x, fc1, torch.randn(384), fc2.half(), torch.randn(96), **options)


@pytest.mark.parametrize("call", [linear_on_cpu, mlp_on_cpu])
def test_an_explicit_choice_says_why_it_cannot_run(call):
    options = {"config": MLP} if call is mlp_on_cpu else {}
    with pytest.raises(RuntimeError, match="resident weights need a GPU, x is on cpu"):
        call(impl="triton", **options)


def test_auto_falls_back_to_the_reference_on_a_cpu():
    torch.manual_seed(0)
    plain = linear_on_cpu(impl="reference", config=None)
    torch.manual_seed(0)
    assert torch.equal(linear_on_cpu(impl="auto"), plain)
    torch.manual_seed(0)
    plain = mlp_on_cpu(impl="reference")
    torch.manual_seed(0)
    assert torch.equal(mlp_on_cpu(impl="auto", config=MLP), plain)


def test_a_product_without_norm_or_with_gelu_is_refused():
    with pytest.raises(RuntimeError, match="resident product has no activation"):
        linear_on_cpu(impl="triton", activation="gelu")
    with pytest.raises(ValueError, match="got ResidentProductConfig"):
        linear_on_cpu(layer_norm_eps=None)
    with pytest.raises(ValueError, match=r"ResidentProductConfig or .*, got GemmConfig"):
        linear_on_cpu(config=GemmConfig(64, 64, 64, 4, 3))


def test_tables_keep_both():
    product, mlp = ResidentProductConfig(32, 3, 1), ResidentMlpConfig(32)
    for op, config in (("layer_norm_linear", product), ("mlp", mlp)):
        stored = config_to_dict(config)
        assert all(isinstance(value, int) for value in stored.values())
        assert config_from_dict(op, stored) == config
    with pytest.raises(ValueError, match="unknown config field"):
        config_from_dict("mlp", config_to_dict(product))
    # the other kernels of the same problems are still told apart
    for op, config in (
        ("layer_norm_linear", LayerNormLinearConfig(64, 64, 1, 4, 2)),
        ("mlp", MlpConfig(64, 64, 4, 2)),
    ):
        assert config_from_dict(op, config_to_dict(config)) == config


H200 = dataclasses.replace(H100, name="NVIDIA H200")


def problems(dtype, rows=ROWS, gelu=0):
    return [
        make_problem("layer_norm_linear", dtype, rows, N=288, K=96, gelu=gelu),
        make_problem("mlp", dtype, rows, C=96, hidden=384, post_norm=0),
    ]


def residents(problem, card=H200):
    kinds = ResidentProductConfig, ResidentMlpConfig
    return [c for c in candidates(problem, card) if isinstance(c, kinds)]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_candidates_start_with_it_where_rows_are_many(dtype):
    product, mlp = problems(dtype)
    assert candidates(product, H200)[0] == PRODUCT
    assert candidates(mlp, H200)[0] == MLP
    assert residents(product) == [PRODUCT, ResidentProductConfig(groups=3)]
    assert residents(mlp) == [MLP, ResidentMlpConfig(32)]
    assert operand_bytes(product, PRODUCT) == PRODUCT.shared_bytes(288, 96)
    assert operand_bytes(mlp, MLP) == MLP.shared_bytes(384, 96)
    assert not any(residents(p) for p in problems(dtype, rows=784))


def test_candidates_elsewhere_are_without_it():
    for dtype in ("fp32", "tf32"):
        assert not any(residents(p) for p in problems(dtype))
    assert residents(problems("fp16", gelu=1)[0]) == []
    for capability in ((8, 0), (12, 0)):
        card = dataclasses.replace(H200, capability=capability)
        for problem, config in zip(problems("fp16"), (PRODUCT, MLP), strict=True):
            assert residents(problem, card) == []
            assert candidates(problem, card)  # of the other kernels
            assert str(capability) in why_invalid(problem, config, capability)
