"""Gradient of the projection's bias: from padded tokens, and summed on the way."""

from __future__ import annotations

import pytest
import torch
from attention_cases import arguments
from backward_cases import CASES, gradients, output_shape, triton, with_leaves


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3], CASES[7]], ids=str)
def test_bias_gradient_of_the_projection_is_summed_on_the_way(case, randn):
    """As a pass over dqkv would give it, padded tokens included; of whole windows and tiles."""
    made = arguments(case, randn, torch.float32)
    made["qkv_bias"] = randn(made["qkv"].shape[-1])
    upstream = randn(*output_shape(case))
    alone = gradients(triton, with_leaves(made), upstream)
    both = gradients(triton, with_leaves(made | {"sum_qkv_grad": True}), upstream)
    assert torch.equal(both["qkv"], alone["qkv"])
    expected = alone["qkv_bias"] + alone["qkv"].flatten(0, 2).sum(0)
    torch.testing.assert_close(both["qkv_bias"], expected, atol=1e-4, rtol=1e-4)


def test_gradient_of_padding_is_that_of_the_padded_map(randn):
    """qkv_bias gets what a map that holds it at its padded tokens would get there."""
    case = CASES[1]
    made = arguments(case, randn, torch.float32)
    upstream = randn(*output_shape(case))
    ours = gradients(triton, with_leaves(made), upstream)
    rows, cols = (-(-s // 4) * 4 for s in case.map_size)
    full = made["qkv_bias"].expand(case.batch, rows, cols, -1).clone()
    full[:, : case.map_size[0], : case.map_size[1]] = made["qkv"]
    whole = with_leaves(made | {"qkv": full})
    padded = torch.zeros(case.batch, rows, cols, upstream.shape[3], device=upstream.device)
    padded[:, : case.map_size[0], : case.map_size[1]] = upstream
    triton(whole).backward(padded)
    gradient = whole["qkv"].grad
    gradient[:, : case.map_size[0], : case.map_size[1]] = 0.0
    torch.testing.assert_close(ours["qkv_bias"], gradient.sum((0, 1, 2)), atol=1e-4, rtol=1e-5)
    assert torch.equal(ours["qkv_bias"][:16], torch.zeros_like(ours["qkv_bias"][:16]))
