"""The registered operators: schema, fake kernels, autograd registration, compile, autocast."""

import pytest
import torch

from fastswin.nn import WindowSoftmax
from fastswin.ops.masked_softmax import (
    grouped_tril_softmax,
    masked_softmax,
    masked_softmax_,
    scaled_masked_softmax,
    window_softmax,
)

fwd = torch.ops.fastswin.masked_softmax_fwd.default
bwd = torch.ops.fastswin.masked_softmax_bwd.default
inplace = torch.ops.fastswin.masked_softmax_inplace.default


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("kind", ["plain", "bool", "float", "lens"])
def test_opcheck(kind, impl, randn):
    x = randn(2, 2, 2, 3, 3).requires_grad_()
    bias = randn(2, 3, 3).requires_grad_()
    operands = {
        "plain": (None, None, None),
        "bool": (bias, randn(2, 1, 3, 3) > 0.5, None),
        "float": (bias, randn(2, 1, 3, 3).requires_grad_(), None),
        "lens": (None, None, torch.tensor([1, 3], device=x.device)),
    }[kind]
    torch.library.opcheck(fwd, (x, *operands, 0.5, kind == "lens", impl))
    y = fwd(x.detach(), *operands, 0.5, kind == "lens", impl).detach().requires_grad_()
    needs = [True, operands[0] is not None, kind == "float"]
    grad = randn(2, 2, 2, 3, 3).requires_grad_()
    torch.library.opcheck(bwd, (grad, y, *operands, 0.5, kind == "lens", needs, impl))
    torch.library.opcheck(inplace, (x.detach().clone(), *operands, 0.5, kind == "lens", impl))


def test_in_place_declares_its_mutation():
    arguments = inplace._schema.arguments
    assert [a.name for a in arguments if a.alias_info and a.alias_info.is_write] == ["x"]
    assert not any(a.alias_info for a in fwd._schema.arguments)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("impl", ["triton", "reference", "auto"])
def test_in_place_equals_out_of_place(impl, layout, randn):
    x = randn(2, 3, 6, 6)
    if layout == "transposed":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    mask = randn(6, 6) > 0.5
    want = masked_softmax(x, mask=mask, scale=0.5, impl=impl)
    pointer = x.data_ptr()
    got = masked_softmax_(x, mask=mask, scale=0.5, impl=impl)
    assert got is x
    assert got.data_ptr() == pointer
    assert torch.allclose(got, want, atol=1e-6)


def test_in_place_gradient_and_leaf(randn):
    x, grad = randn(2, 5, 5).requires_grad_(), randn(2, 5, 5)
    y = masked_softmax_(x * 2, causal=True, impl="triton")
    want = masked_softmax(x * 2, causal=True, impl="triton")
    assert torch.equal(y, want)
    (ours,) = torch.autograd.grad(y, x, grad)
    (theirs,) = torch.autograd.grad(want, x, grad)
    assert torch.equal(ours, theirs)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        masked_softmax_(x)


FORMS = {
    "masked": lambda x, b, m: scaled_masked_softmax(x, m[:, None] < -1, 0.5),
    "window": lambda x, b, m: window_softmax(x, b, m),
    "module": lambda x, b, m: WindowSoftmax()(x, b, m),
    "tril": lambda x, b, m: grouped_tril_softmax(x, torch.tensor([1, 5, 3, 0])),
    "in place": lambda x, b, m: masked_softmax_(x + 0.0, bias=b),
}


@pytest.mark.parametrize("form", FORMS)
def test_compile_fullgraph(form, randn, device):
    function = FORMS[form]
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    x, b, m = randn(4, 2, 5, 5), randn(2, 5, 5), randn(4, 5, 5)
    wanted = form != "in place"
    x.requires_grad_(wanted)
    with torch.set_grad_enabled(wanted):
        want, got = function(x, b, m), compiled(x, b, m)
    assert torch.allclose(got, want, atol=1e-6)
    if wanted:
        grad = randn(4, 2, 5, 5)
        ours = torch.autograd.grad(got, x, grad)[0]
        assert torch.allclose(ours, torch.autograd.grad(want, x, grad)[0], atol=1e-6)


@pytest.mark.parametrize("autocast_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_autocast_changes_nothing_and_backward_may_run_outside(
    dtype, autocast_dtype, randn, device
):
    x = randn(3, 4, 4, dtype=dtype).requires_grad_()
    bias, mask = randn(3, 4, 4).requires_grad_(), randn(4, 4)
    grad = randn(3, 4, 4, dtype=dtype)
    plain = masked_softmax(x, bias=bias, mask=mask)
    with torch.autocast(device.type, dtype=autocast_dtype):
        y = masked_softmax(x, bias=bias, mask=mask)
        reference = masked_softmax(x, bias=bias, mask=mask, impl="reference")
    assert y.dtype == reference.dtype == dtype
    assert torch.equal(y, plain)
    dx, dbias = torch.autograd.grad(y, (x, bias), grad)
    assert dx.dtype == dtype
    assert dbias.dtype == torch.float32


def test_scores_of_an_autocast_product_keep_its_dtype(randn, device):
    q = randn(2, 3, 4).requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = masked_softmax(q @ q.transpose(-1, -2))
    assert y.dtype == torch.bfloat16
    y.float().pow(2).sum().backward()
    assert q.grad.dtype == torch.float32
