"""Limits, choices and refusals of the streamed MLP, without a card."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from mlp_cases import make_mlp

from fastswin import ops
from fastswin.ops.streamed_mlp.config import (
    MAX_SHARED_BYTES,
    ROUND_US,
    StreamedMlpConfig,
    config_blocker,
    default_streamed_mlp_config,
    why_no_streamed_mlp,
)
from fastswin.ops.streamed_mlp.launch import streamed_mlp_fwd
from fastswin.tuning.card import H100
from fastswin.tuning.problem import config_from_dict, config_to_dict, make_problem
from fastswin.tuning.space import candidates, operand_bytes, why_invalid

THREE, TWO, SHARED = StreamedMlpConfig(3), StreamedMlpConfig(2), StreamedMlpConfig(2, 2)
H200 = dataclasses.replace(H100, name="NVIDIA H200")


@pytest.mark.parametrize(
    ("config", "C", "H", "reason"),
    [
        (THREE, 192, 768, None),
        (SHARED, 192, 256, None),
        (TWO, 256, 1024, None),
        (StreamedMlpConfig(4), 192, 768, "groups must be 2 or 3, got 4"),
        (StreamedMlpConfig(2, 4), 192, 768, "programs must be 1 or 2, got 4"),
        (StreamedMlpConfig(3, 2), 192, 768, "two programs have two groups each"),
        (THREE, 96, 384, "rows must have 128, 192, 256 channels, got 96"),
        (THREE, 256, 1024, "registers hold the sums of 2 groups of 256 channels"),
        (TWO, 192, 800, "hidden units come in steps of 64, at least two, got 800"),
        (SHARED, 192, 832, "hidden units come in steps of 128, at least two, got 832"),
        (TWO, 192, 64, "at least two, got 64"),
        (SHARED, 256, 1024, "leaves room for 3 chunks of 256 channels, not 4"),
    ],
    ids=str,
)  # fmt: skip
def test_what_tiles_need(config, C, H, reason):
    found = config_blocker(config, 25088, C, H)
    assert found is None if reason is None else reason in found


def test_rows_are_addressed_in_32_bits():
    assert config_blocker(THREE, 2**31 // 192 + 192, 192, 768) is not None


@pytest.mark.parametrize("post_norm", [False, True])
def test_memory_fits(post_norm):
    for C, tiles in ROUND_US.items():
        for config in tiles:
            assert config.shared_bytes(C, 4 * C, post_norm) <= MAX_SHARED_BYTES
            assert config.slots(C, 4 * C, post_norm) >= 4


@pytest.mark.parametrize(
    ("M", "C", "config"),
    [
        (6272, 192, SHARED),  # Swin-T at 8
        (8192, 192, SHARED),
        (12544, 192, TWO),
        (25088, 192, THREE),
        (32768, 192, TWO),
        (50176, 192, THREE),
        (3136, 192, None),  # 50 programs
        (25088, 128, THREE),
        (8192, 128, SHARED),
        (6272, 256, None),  # 49 programs
        (25088, 256, TWO),
        (25088, 96, None),
        (25088, 384, None),
    ],
)
def test_tiles_by_rows(M, C, config):
    assert default_streamed_mlp_config(M, 4 * C, C, 132) == config


def test_hidden_units_that_two_programs_cannot_share():
    """13 steps: programs of 128 or 192 rows alone are left."""
    assert default_streamed_mlp_config(15_000, 832, 192, 132) == TWO
    assert default_streamed_mlp_config(6272, 832, 192, 132) is None


def test_the_launcher_refuses_before_anything_is_launched():
    x = torch.zeros(64, 96, dtype=torch.float16)
    weight = torch.zeros(384, 96, dtype=torch.float16), torch.zeros(384)
    with pytest.raises(ValueError, match="config does not fit: rows must have 128, 192, 256"):
        streamed_mlp_fwd(x, weight, weight, None, None, 1e-5, x, THREE)


def test_the_operator_names_what_is_missing():
    made = make_mlp(100, 192)
    with pytest.raises(RuntimeError, match="clusters of programs need a GPU"):
        ops.mlp(**made, impl="triton", config=THREE)
    assert "half precision" in why_no_streamed_mlp(torch.device("cuda"), torch.float32)


def mlp_problem(rows, C=192, dtype="fp16"):
    return make_problem("mlp", dtype, rows, C=C, hidden=4 * C, post_norm=0)


def test_tables_keep_it():
    stored = config_to_dict(SHARED)
    assert stored == {"groups": 2, "programs": 2}
    assert config_from_dict("mlp", stored) == SHARED


def test_the_tuner_tries_it():
    found = candidates(mlp_problem(25088), H200)
    assert found[0] == THREE
    assert {THREE, TWO, SHARED} <= set(found)
    assert operand_bytes(mlp_problem(25088), THREE) == THREE.shared_bytes(192, 768, False)
    for problem, capability in ((mlp_problem(25088), (8, 0)), (mlp_problem(25088, 96), (9, 0))):
        assert why_invalid(problem, THREE, capability) is not None
    assert "half precision" in why_invalid(mlp_problem(25088, dtype="fp32"), THREE, (9, 0))
    assert not any(isinstance(c, StreamedMlpConfig) for c in candidates(mlp_problem(784), H200))
