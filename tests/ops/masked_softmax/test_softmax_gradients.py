"""Which gradients exist, second derivatives, determinism, half-precision overflow."""

import itertools
import math

import pytest
import torch
from softmax_oracle import check_against_oracle

from fastswin.ops.masked_softmax import grouped_tril_softmax, masked_softmax, window_softmax
from fastswin.ops.masked_softmax.reference import masked_softmax_ref
from fastswin.testing.poison import PoisonEmpty

SUBSETS = [s for r in range(4) for s in itertools.combinations(("scores", "bias", "mask"), r)]


@pytest.mark.parametrize("wanted", SUBSETS, ids=lambda s: "+".join(s) or "nothing")
def test_only_requested_gradients(wanted, randn):
    tensors = {"scores": randn(6, 3, 5, 5), "bias": randn(3, 5, 5), "mask": randn(2, 5, 5)}
    for name in wanted:
        tensors[name].requires_grad_()
    y = window_softmax(**tensors, impl="triton")
    assert y.requires_grad is bool(wanted)
    if not wanted:
        return
    grad = randn(6, 3, 5, 5)
    y.backward(grad)
    exact = {n: t.detach().double().requires_grad_(n in wanted) for n, t in tensors.items()}
    window_softmax(**exact, impl="reference").backward(grad.double())
    for name, t in tensors.items():
        assert (t.grad is not None) is (name in wanted)
        if t.grad is not None:
            assert torch.allclose(t.grad.double(), exact[name].grad, atol=2e-6)


BIAS_SHAPES = [(4, 5), (1, 5), (3, 4, 5), (3, 1, 5), (2, 1, 4, 5), (2, 3, 4, 5)]


@pytest.mark.parametrize("bias_shape", BIAS_SHAPES, ids=str)
@pytest.mark.parametrize("mask_shape", [None, (2, 1, 1, 5), (2, 3, 4, 5)], ids=str)
def test_bias_and_mask_of_any_broadcast_shape(bias_shape, mask_shape, randn):
    x = randn(2, 3, 4, 5).requires_grad_()
    mask = None if mask_shape is None else randn(*mask_shape).requires_grad_()
    check_against_oracle(x, bias=randn(*bias_shape).requires_grad_(), mask=mask)


@pytest.mark.parametrize("bias_shape", [(4, 1), (1, 1), (1,), (3, 1, 1)], ids=str)
def test_a_bias_that_is_constant_along_the_keys_has_no_gradient(bias_shape, randn):
    x, bias = randn(2, 3, 4, 5), randn(*bias_shape).requires_grad_()
    y = masked_softmax(x, bias=bias, impl="triton")
    (dbias,) = torch.autograd.grad(y, bias, randn(2, 3, 4, 5))
    assert dbias.shape == bias.shape
    assert dbias.abs().max() < 1e-5, "softmax does not see a shift of the whole row"


def test_half_scores_sum_the_bias_gradient_in_fp32(randn):
    scores, bias = randn(64, 1, 3, 3, dtype=torch.float16), randn(1, 3, 3).requires_grad_()
    grad = randn(64, 1, 3, 3, dtype=torch.float16, spread=100)
    y = window_softmax(scores, bias, impl="triton")
    (got,) = torch.autograd.grad(y, bias, grad)
    p, g = y.double(), grad.double()
    want = (p * (g - (p * g).sum(-1, keepdim=True))).sum(0)
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("impl", ["triton", "auto"])
@pytest.mark.parametrize("form", ["masked", "window", "tril"])
def test_second_derivative_equals_the_reference(form, impl, randn):
    x = randn(2, 2, 9, 9)
    options = {
        "masked": {"mask": randn(9, 9) > 1, "scale": 0.5},
        "window": {"bias": randn(2, 9, 9), "mask": randn(2, 1, 9, 9)},
        "tril": {"causal": True, "seq_lens": torch.tensor([4, 9])},
    }[form]

    def second(dtype, call, **kwargs):
        q = x.to(dtype).requires_grad_()
        own = dict(options)
        if "bias" in own:
            own["bias"] = own["bias"].to(dtype).requires_grad_()
        y = call(q, **own, **kwargs)
        (g,) = torch.autograd.grad(y.pow(2).sum(), q, create_graph=True)
        leaves = [q] if "bias" not in own else [q, own["bias"]]
        return torch.autograd.grad(g.pow(2).sum(), leaves)

    exact = second(torch.float64, masked_softmax_ref)
    for ours, truth in zip(second(torch.float32, masked_softmax, impl=impl), exact, strict=True):
        assert truth.abs().max() > 1e-3
        assert torch.allclose(ours.double(), truth, rtol=1e-4, atol=1e-6)


def test_create_graph_without_a_second_backward(randn):
    x = randn(2, 2, 5, 5).requires_grad_()
    y = masked_softmax(x, impl="triton")
    (g,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    (plain,) = torch.autograd.grad(masked_softmax(x, impl="triton").pow(2).sum(), x)
    assert torch.equal(g.detach(), plain)


@pytest.mark.parametrize("form", ["window", "tril"])
def test_three_runs_are_bitwise_equal_on_poisoned_memory(form, randn):
    scores, bias, mask = randn(8, 3, 7, 7), randn(3, 7, 7), randn(4, 7, 7)
    grad = randn(8, 3, 7, 7)

    def run():
        x = scores.clone().requires_grad_()
        b = bias.clone().requires_grad_()
        with PoisonEmpty():
            if form == "window":
                y = window_softmax(x, b, mask, impl="triton")
                return y, *torch.autograd.grad(y, (x, b), grad)
            lens = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])
            y = grouped_tril_softmax(x, lens, impl="triton")
            return y, *torch.autograd.grad(y, x, grad)

    first = run()
    assert all(torch.isfinite(t).all() for t in first)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


def test_overflowing_upstream_gradient_reaches_the_scaler(randn):
    x = randn(2, 5, dtype=torch.float16).requires_grad_()
    y = masked_softmax(x, impl="triton")
    grad = torch.full_like(y, 1.0)
    grad[0, 0] = math.inf
    (dx,) = torch.autograd.grad(y, x, grad)
    assert not torch.isfinite(dx[0]).all()
    assert torch.isfinite(dx[1]).all()
