"""Every refusal comes before a launch and names the argument; clashing shapes are both told."""

import math
import re

import pytest
import torch

from fastswin.ops.masked_softmax import (
    grouped_tril_softmax,
    masked_softmax,
    masked_softmax_,
    scaled_masked_softmax,
    window_softmax,
)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


X = (2, 3, 4, 4)
CASES = {
    "int scores": (lambda: masked_softmax(zeros(*X, dtype=torch.int32)), TypeError, "x must be"),
    "scalar": (lambda: masked_softmax(torch.tensor(0.0)), ValueError, "at least one axis"),
    "int64 mask": (
        lambda: masked_softmax(zeros(*X), mask=zeros(4, dtype=torch.int64)),
        TypeError, "mask must be bool or uint8.*int64",
    ),
    "0/1 float mask": (
        lambda: masked_softmax(zeros(*X), mask=torch.tensor([0.0, 1, 0, 1])),
        ValueError, "holds only 0 and 1",
    ),
    "0/1 half mask": (
        lambda: window_softmax(zeros(*X), None, torch.ones(2, 4, 4, dtype=torch.float16)),
        ValueError, "holds only 0 and 1",
    ),
    "mask too large": (
        lambda: masked_softmax(zeros(*X), mask=zeros(5, 4, dtype=torch.bool)),
        ValueError, r"mask of shape \(5, 4\).*\(2, 3, 4, 4\)",
    ),
    "mask would enlarge x": (
        lambda: masked_softmax(zeros(1, 4), mask=zeros(3, 4, dtype=torch.bool)),
        ValueError, r"mask of shape \(3, 4\).*\(1, 4\)",
    ),
    "mask of more axes": (
        lambda: masked_softmax(zeros(4), mask=zeros(1, 4, dtype=torch.bool)),
        ValueError, r"mask of shape \(1, 4\).*\(4,\)",
    ),
    "bool bias": (
        lambda: masked_softmax(zeros(*X), bias=zeros(4, dtype=torch.bool)),
        TypeError, "bias must be a float",
    ),
    "bias shape": (
        lambda: masked_softmax(zeros(*X), bias=zeros(2, 1, 1)),
        ValueError, r"bias of shape \(2, 1, 1\).*\(2, 3, 4, 4\)",
    ),
    "mask on another device": (
        lambda: masked_softmax(zeros(*X), mask=torch.zeros(4, dtype=torch.bool, device="meta")),
        ValueError, "mask is on meta and x on cpu",
    ),
    "bias on another device": (
        lambda: window_softmax(zeros(*X), torch.zeros(3, 4, 4, device="meta")),
        ValueError, "bias is on meta and x on cpu",
    ),
    "scale nan": (lambda: masked_softmax(zeros(*X), scale=math.nan), ValueError, "scale must be"),
    "scale tensor": (
        lambda: scaled_masked_softmax(zeros(*X), None, torch.ones(1)), ValueError, "scale must be"
    ),
    "impl": (lambda: masked_softmax(zeros(*X), impl="cuda"), ValueError, "impl must be one of"),
    "causal vector": (lambda: masked_softmax(zeros(4), causal=True), ValueError, "causal needs"),
    "tril 3-d": (
        lambda: grouped_tril_softmax(zeros(2, 4, 4), torch.tensor([1, 1])),
        ValueError, r"\[B, M, S, S\]",
    ),
    "tril not square": (
        lambda: grouped_tril_softmax(zeros(2, 1, 4, 5), torch.tensor([1, 1])),
        ValueError, r"square.*\(2, 1, 4, 5\)",
    ),
    "lens count": (
        lambda: grouped_tril_softmax(zeros(*X), torch.tensor([1, 1, 1])),
        ValueError, r"seq_lens must be \[2\].*\(2, 3, 4, 4\).*\(3,\)",
    ),
    "lens float": (
        lambda: grouped_tril_softmax(zeros(*X), torch.tensor([1.0, 1.0])), TypeError, "int32"
    ),
    "lens above S": (
        lambda: grouped_tril_softmax(zeros(*X), torch.tensor([1, 5])),
        ValueError, r"\[0, 4\].*1 to 5",
    ),
    "lens negative": (
        lambda: grouped_tril_softmax(zeros(*X), torch.tensor([-1, 4])),
        ValueError, r"\[0, 4\].*-1 to 4",
    ),
    "window scores": (
        lambda: window_softmax(zeros(2, 3, 4, 5), None), ValueError, r"\(2, 3, 4, 5\)"
    ),
    "window bias": (
        lambda: window_softmax(zeros(*X), zeros(2, 4, 4)),
        ValueError, r"\(2, 3, 4, 4\), got \(2, 4, 4\)",
    ),
    "window mask shape": (
        lambda: window_softmax(zeros(*X), None, zeros(2, 4, 5)),
        ValueError, r"\(2, 3, 4, 4\), got \(2, 4, 5\)",
    ),
    "window mask count": (
        lambda: window_softmax(zeros(*X), None, zeros(3, 4, 4)),
        ValueError, r"\(3, 4, 4\) has nW=3, which does not divide the 2 windows",
    ),
    "in place on an expanded tensor": (
        lambda: masked_softmax_(zeros(1, 4).expand(3, 4)), ValueError, "overlaps itself"
    ),
    "triton on fp64": (
        lambda: masked_softmax(zeros(*X, dtype=torch.float64), impl="triton"),
        RuntimeError, "impl='triton' cannot run here.*float64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused(case):
    call, error, message = CASES[case]
    with pytest.raises(error, match=message) as caught:
        call()
    assert not re.search(r"\n", str(caught.value)), "one line"


def test_a_refused_in_place_call_writes_nothing():
    x = torch.randn(3, 4)
    before = x.clone()
    with pytest.raises(ValueError, match="does not broadcast"):
        masked_softmax_(x, bias=torch.zeros(5))
    assert torch.equal(x, before)


def test_a_mask_changed_in_place_is_looked_at_again():
    x, mask = torch.randn(2, 4), torch.zeros(4)
    masked_softmax(x, mask=mask)
    mask[1] = 1.0
    with pytest.raises(ValueError, match="holds only 0 and 1"):
        masked_softmax(x, mask=mask)
