"""Gradients of attention on windows that are cut already."""

from __future__ import annotations

import pytest
import torch

from fastswin import ops


@pytest.mark.parametrize("tokens", [9, 80], ids=["whole", "tiles"])
@pytest.mark.parametrize("mask", ["none", "float", "bool"])
def test_partitioned(mask, tokens, randn):
    """Windows that are cut already; a query without a visible key has a gradient of zero."""
    heads, windows = (2, 6) if tokens == 9 else (1, 2)
    shape = (windows, heads, tokens, 16)
    q, k, v = (randn(*shape) for _ in range(3))
    bias, upstream = randn(heads, tokens, tokens), randn(*shape).transpose(1, 2).contiguous()
    upstream = upstream.transpose(1, 2)
    masks = {
        "none": None,
        "float": randn(2, tokens, tokens, spread=3.0),
        "bool": randn(2, tokens, tokens) > 0.3,
    }
    if mask == "bool":
        masks["bool"][1, 5] = True
    results = {}
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v, bias)]
        added = masks[mask]
        if mask == "float":
            added = added.to(dtype)
        out = ops.window_attention_partitioned(
            *leaves[:3], bias=leaves[3], mask=added, impl=impl
        )  # fmt: skip
        results[impl] = torch.autograd.grad(out, leaves, upstream.to(dtype))
    for ours, truth in zip(*results.values(), strict=True):
        torch.testing.assert_close(ours.double(), truth, atol=3e-5, rtol=1e-5)
    if mask == "bool":
        assert torch.equal(results["triton"][0][1::2, :, 5], torch.zeros_like(q[1::2, :, 5]))


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_partitioned_gives_only_what_is_asked_for(name, randn):
    made = {n: randn(2, 2, 9, 16) for n in ("q", "k", "v")} | {"bias": randn(2, 9, 9)}
    upstream = randn(2, 2, 9, 16)
    results = []
    for wanted in (("q", "k", "v", "bias"), (name,)):
        leaves = {n: t.clone().requires_grad_(n in wanted) for n, t in made.items()}
        ops.window_attention_partitioned(**leaves, impl="triton").backward(upstream)
        results.append(leaves)
    assert torch.equal(results[0][name].grad, results[1][name].grad)
    assert all(t.grad is None for n, t in results[1].items() if n != name)


def test_mask_with_a_gradient_is_refused_by_name(randn):
    q, k, v = (randn(2, 1, 4, 16) for _ in range(3))
    mask = randn(2, 4, 4).requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient of mask"):
        ops.window_attention_partitioned(q, k, v, mask=mask, impl="triton")
