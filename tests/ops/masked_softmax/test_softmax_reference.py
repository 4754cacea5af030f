"""The reference is differentiable twice, in fp64, whatever the operands."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fastswin.ops.masked_softmax import masked_softmax, masked_softmax_, window_softmax


def operands(kind):
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(2, 2, 3, 5, 5, dtype=torch.float64, generator=rng, requires_grad=True)
    bias = torch.randn(3, 5, 5, dtype=torch.float64, generator=rng, requires_grad=True)
    options = {}
    if kind == "bool":
        hide = torch.rand(2, 1, 5, 5, generator=rng) < 0.4
        hide[1, 0, 2] = True
        options["mask"] = hide
    if kind == "causal, lens":
        options |= {"causal": True, "seq_lens": torch.tensor([3, 0])}
    mask = None
    if kind == "float":
        mask = torch.randn(2, 1, 5, 5, dtype=torch.float64, generator=rng, requires_grad=True)
    return x, bias, mask, options


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("kind", ["plain", "bool", "float", "causal, lens"])
def test_first_and_second_derivatives(kind, impl):
    x, bias, mask, options = operands(kind)
    inputs = [t for t in (x, bias, mask) if t is not None]

    def call(x, bias, *mask):
        own = {"mask": mask[0]} if mask else {}
        return masked_softmax(x, bias=bias, scale=0.7, impl=impl, **options, **own)

    assert gradcheck(call, inputs, fast_mode=True)
    assert gradgradcheck(call, inputs, fast_mode=True)


def test_window_form_derivatives():
    rng = torch.Generator().manual_seed(5)
    make = {"dtype": torch.float64, "generator": rng, "requires_grad": True}
    tensors = (
        torch.randn(4, 2, 3, 3, **make), torch.randn(2, 3, 3, **make), torch.randn(2, 3, 3, **make)
    )  # fmt: skip
    assert gradcheck(window_softmax, tensors)
    assert gradgradcheck(window_softmax, tensors, fast_mode=True)


def test_in_place_form_derivatives():
    x = torch.randn(2, 5, 5, dtype=torch.float64, requires_grad=True)

    def call(x):
        return masked_softmax_(x * 1.5, causal=True)

    assert gradcheck(call, (x,))
    assert gradgradcheck(call, (x,), fast_mode=True)
