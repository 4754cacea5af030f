"""Dropout of attention weights: backward and reference draw what the forward drew."""

from __future__ import annotations

import pytest
import torch
from attention_cases import arguments
from backward_cases import CASES, check, reference, triton


@pytest.mark.parametrize("case", [CASES[1], CASES[7]], ids=str)
def test_dropout_draws_the_same_weights_again(case, randn):
    check(case, torch.float32, randn, {"dropout_p": 0.4, "dropout_seed": 11})


@pytest.mark.parametrize("seed", [0, 2**40 + 17])
def test_dropout_of_kernel_and_reference_agree(seed, randn):
    made = arguments(CASES[1], randn, torch.float32) | {"dropout_p": 0.3, "dropout_seed": seed}
    torch.testing.assert_close(triton(made), reference(made), atol=1e-5, rtol=0)
    made["dropout_seed"] = seed + 1
    assert not torch.allclose(triton(made), reference(made | {"dropout_seed": seed}), atol=1e-2)
