"""Gradient of a relative position bias table, directly and through the dense bias."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_cases import Case, arguments
from backward_cases import gradients, output_shape, triton, with_leaves

from fastswin import ops
from fastswin.ops.window_attention.geometry import expand_bias_table
from fastswin.ops.window_attention.tables import table_gradient


def test_bias_table_gradient(randn):
    """Sum of the dense gradient over all pairs at one relative position, without an index."""
    rows, cols = 4, 3
    table = randn((2 * rows - 1) * (2 * cols - 1), 2).requires_grad_()
    dense = expand_bias_table(table, (rows, cols))
    upstream = randn(*dense.shape)
    dense.backward(upstream)
    want = torch.zeros_like(table)
    for q, k in itertools.product(range(rows * cols), repeat=2):
        dy, dx = q // cols - k // cols, q % cols - k % cols
        at = (dy + rows - 1) * (2 * cols - 1) + dx + cols - 1
        assert torch.equal(dense[:, q, k], table[at])
        want[at] += upstream[:, q, k]
    torch.testing.assert_close(table.grad, want, atol=1e-5, rtol=1e-5)


def test_bias_table_gets_the_gradient_of_the_dense_bias(randn):
    case = Case("table", (4, 3), (4, 3), batch=1)
    made = arguments(case, randn, torch.float32)
    upstream = randn(*output_shape(case))
    table = randn(7 * 5, 2).requires_grad_()
    dense = expand_bias_table(table, (4, 3))
    ours = gradients(triton, with_leaves(made | {"bias": dense.detach()}), upstream)["bias"]
    (want,) = torch.autograd.grad(dense, table, ours)
    found = []
    for _ in range(2):
        table.grad = None
        triton(made | {"bias": None, "bias_table": table}).backward(upstream)
        found.append(table.grad)
    torch.testing.assert_close(found[0], want, atol=1e-6, rtol=1e-5)  # another order of the sum
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("window", "dtype", "runs"),
    [((4, 3), torch.float32, 0), ((4, 3), torch.float16, 37), ((5, 13), torch.float32, 2)],
    ids=str,
)
def test_partial_sums_become_the_gradient_of_a_table(window, dtype, runs, randn):
    """Padded query and key columns hold what no sum may read."""
    (rows, cols), heads = window, 2 if window == (4, 3) else 1
    tokens, padded = rows * cols, rows * cols + 4
    partial = torch.full((runs, heads, padded, padded), float("nan"), device=randn(1).device)
    partial[..., :tokens, :tokens] = randn(runs, heads, tokens, tokens)
    table = randn((2 * rows - 1) * (2 * cols - 1), heads, dtype=dtype)
    wide = table.double().requires_grad_()
    dense = partial[..., :tokens, :tokens].double().sum(0)
    (truth,) = torch.autograd.grad(expand_bias_table(wide, window), wide, dense)
    actual = table_gradient(partial, table, window)
    assert actual.dtype == dtype
    bound = 2 * torch.finfo(dtype).eps * max(1.0, truth.abs().max().item())
    assert (actual - truth).abs().max() <= bound


def test_a_bias_table_is_differentiable_twice(randn):
    qkv, table, upstream = randn(1, 4, 6, 48), randn(9, 1), randn(1, 4, 6, 16)
    found = []
    for impl in ("triton", "reference"):
        leaves = [qkv.clone().requires_grad_(), table.clone().requires_grad_()]
        out = ops.window_attention(
            leaves[0], num_heads=1, window_size=(2, 2), bias_table=leaves[1], impl=impl
        )
        first = torch.autograd.grad(out, leaves, upstream, create_graph=True)
        found.append([*first, *torch.autograd.grad([g.square().sum() for g in first], leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
