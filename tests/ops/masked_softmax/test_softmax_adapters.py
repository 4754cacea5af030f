"""apex's and Megatron's names: argument order, mask polarity, values."""

import enum

import pytest
import torch

from fastswin.ops.masked_softmax import adapters


class AttnMaskType(enum.Enum):
    padding = 1
    causal = 2


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("scale", [0.25, torch.tensor([0.25])], ids=["number", "tensor"])
@pytest.mark.parametrize(
    "call",
    [
        adapters.scaled_masked_softmax,
        adapters.generic_scaled_masked_softmax,
        adapters.ScaledMaskedSoftmax.apply,
    ],
    ids=["function", "generic", "autograd function"],
)
def test_mask_of_ones_hides(call, scale, mask_dtype, randn):
    x = randn(2, 4, 3, 7, dtype=torch.float16)
    hidden = randn(2, 1, 3, 7) > 0
    hidden[0, 0, 1] = True
    y = call(x, hidden.to(mask_dtype), scale)
    want = (x.double() * 0.25).masked_fill(hidden, -float("inf")).softmax(-1).nan_to_num(0.0)
    assert torch.allclose(y.double(), want, atol=1e-3)
    assert (y.masked_select(hidden) == 0).all()


def test_without_mask_and_causal(randn):
    x = randn(4, 5, 5)
    assert torch.allclose(adapters.ScaledSoftmax.apply(x, 2.0), (2 * x).softmax(-1), atol=1e-6)
    hidden = torch.ones(5, 5, dtype=torch.bool, device=x.device).triu(1)
    want = (2 * x).masked_fill(hidden, -float("inf")).softmax(-1)
    for got in (
        adapters.ScaledUpperTriangMaskedSoftmax.apply(x, 2.0),
        adapters.scaled_upper_triang_masked_softmax(x, None, 2.0),
    ):
        assert torch.allclose(got, want, atol=1e-6)
    with pytest.raises(ValueError, match="square"):
        adapters.scaled_upper_triang_masked_softmax(x[:, :3], None, 1.0)


@pytest.mark.parametrize("kind", [AttnMaskType.padding, AttnMaskType.causal, "causal"], ids=str)
def test_module(kind, randn):
    module = adapters.FusedScaleMaskSoftmax(True, False, kind, True, None, True, 0.5)
    x = randn(2, 3, 4, 4, dtype=torch.float16)
    hidden = randn(2, 1, 4, 4) > 0.5
    full = hidden.clone()
    if kind is not AttnMaskType.padding:
        full |= torch.ones(4, 4, dtype=torch.bool, device=x.device).triu(1)
    want = (x.double() * 0.5).masked_fill(full, -float("inf")).softmax(-1).nan_to_num(0.0)
    assert torch.allclose(module(x, hidden).double(), want, atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((True, True, "padding", True, None, True, None), "exclude each other"),
        ((True, False, "padding", True, None, False, 0.5), "softmax_in_fp32"),
        ((True, False, "sliding", True, None, True, None), "attn_mask_type"),
    ],
    ids=["two half types", "scale in half", "unknown mask type"],
)
def test_module_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        adapters.FusedScaleMaskSoftmax(*arguments)
