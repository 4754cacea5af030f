"""Kernels against the fp64 oracle: lengths, dtypes, operands, layouts, both directions."""

import pytest
import torch
from softmax_oracle import check_against_oracle

from fastswin.ops.masked_softmax import masked_softmax
from fastswin.ops.masked_softmax.backward import masked_softmax_bwd
from fastswin.ops.masked_softmax.config import SoftmaxConfig
from fastswin.ops.masked_softmax.forward import masked_softmax_fwd

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [1, 2, 3, 9, 16, 31, 33, 49, 64, 98, 127, 128, 129, 144, 196, 256, 576, 2048, 2049]
LONG = [4096, 16384, 16385, 20001]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", LENGTHS)
def test_every_length(keys, dtype, randn):
    check_against_oracle(randn(1, 3, 2, keys, dtype=dtype, spread=2).requires_grad_(), scale=0.3)


@pytest.mark.parametrize("keys", [*LONG, 40000])
def test_long_rows(keys, randn):
    x = randn(1, 2, keys, dtype=torch.float16).requires_grad_()
    check_against_oracle(x, mask=(torch.arange(keys, device=x.device) % 7 == 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_pass_rows_with_every_operand(dtype, randn):
    x = randn(2, 2, 33000, dtype=dtype).requires_grad_()
    check_against_oracle(
        x, bias=randn(2, 1, 33000).requires_grad_(), mask=randn(33000).requires_grad_()
    )


@pytest.mark.parametrize("keys", [5000, 5001])
def test_two_pass_causal_rows(keys, randn):
    x = randn(1, 3, keys).requires_grad_()
    check_against_oracle(x, causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", ["none", "bool", "uint8", "float16", "float32"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_window_shapes_with_bias_and_mask(bias, mask, dtype, randn):
    windows, heads, n = 2, 3, 5
    x = randn(2, windows, heads, n, n, dtype=dtype, spread=3).requires_grad_()
    mask_of = {
        "none": None,
        "bool": randn(windows, 1, n, n) > 0.8,
        "uint8": (randn(windows, 1, n, n) > 0.8).to(torch.uint8) * 2,
        "float16": (randn(windows, 1, n, n) > 0.8).half() * -100,
        "float32": randn(windows, 1, n, n).requires_grad_(),
    }[mask]
    own = randn(heads, n, n, dtype=dtype).requires_grad_() if bias else None
    check_against_oracle(x, bias=own, mask=mask_of)


@pytest.mark.parametrize("spread", [1e2, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_lose_nothing(dtype, spread, randn):
    x = randn(4, 40, dtype=dtype, spread=spread)
    x[:, 20:] = x[:, :1]  # ties at the top, which a rounded score would break
    check_against_oracle(x.requires_grad_())


@pytest.mark.parametrize("scale", [-0.5, 0.0, 8.0])
def test_scales(scale, randn):
    check_against_oracle(randn(2, 3, 11).requires_grad_(), scale=scale)


LAYOUTS = {
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every second key": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "slice of wider rows": lambda t: torch.nn.functional.pad(t, (1, 2))[..., 1:-2],
    "heads last": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "one element off": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["x", "grad", "mask", "bias"])
def test_layouts_equal_contiguous_clones(which, layout, randn):
    shape = (2, 3, 6, 6)
    tensors = {"x": randn(*shape), "grad": randn(*shape), "bias": randn(1, *shape[1:])}
    tensors["mask"] = randn(*shape)

    def run(tensors):
        x = tensors["x"].detach().requires_grad_()
        bias = tensors["bias"].detach().requires_grad_()
        y = masked_softmax(x, bias=bias, mask=tensors["mask"], impl="triton")
        return y.detach(), *torch.autograd.grad(y, (x, bias), tensors["grad"])

    want = run(tensors)
    before = {name: t.clone() for name, t in tensors.items()}
    shuffled = tensors | {which: LAYOUTS[layout](tensors[which])}
    assert torch.equal(shuffled[which], tensors[which])
    # rows off 16 bytes are summed in another order, so the last bit may differ
    for ours, theirs in zip(run(shuffled), want, strict=True):
        assert torch.allclose(ours, theirs, rtol=2e-6, atol=5e-7)
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)


def test_expanded_gradient_of_a_sum(randn):
    x = randn(2, 3, 5, 5).requires_grad_()
    weight = randn(1).item()
    y = masked_softmax(x, impl="triton")
    grad = torch.full((1,), weight, device=x.device).expand(y.shape)
    got = torch.autograd.grad(y, x, grad, retain_graph=True)[0]
    assert got.abs().max() < 1e-6
    want = torch.autograd.grad(y, x, grad.contiguous())[0]
    assert torch.equal(got, want)


def test_expanded_scores(randn):
    x = randn(1, 1, 4, 6).expand(2, 3, 4, 6)
    assert torch.equal(
        masked_softmax(x, impl="triton"), masked_softmax(x.contiguous(), impl="triton")
    )


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("rows", [2, 8])
def test_any_cut_gives_the_same_result(rows, steps, randn):
    x, bias = randn(5, 2, 3, 12), randn(2, 3, 12)
    config = SoftmaxConfig(rows, 8, 1, steps=steps)
    y = masked_softmax_fwd(x, bias, None, None, 1.0, False, config=config)
    want = masked_softmax(x, bias=bias, impl="reference")
    assert torch.allclose(y, want, atol=1e-6)
    grad = randn(5, 2, 3, 12)
    dx, dbias, _ = masked_softmax_bwd(
        grad, y, bias, None, None, 1.0, False, (True, True, False), config=config
    )
    ds = y * (grad - (grad * y).sum(-1, keepdim=True))
    assert torch.allclose(dx, ds, atol=1e-6)
    assert torch.allclose(dbias, ds.sum(0), atol=1e-5)


def gradients(grad, y, bias, config):
    """dx and dbias, twice: the same bits."""
    needs = (True, bias is not None, False)
    runs = [
        masked_softmax_bwd(grad, y, bias, None, None, 0.5, False, needs, config=config)[:2]
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    return runs[0]


@pytest.mark.parametrize("programs", [0.01, 32])
@pytest.mark.parametrize("heads", [2, 3], ids=["even rows", "odd rows"])
def test_any_number_of_programs_gives_the_same_bias_gradient(heads, programs, randn):
    y = randn(6, heads, 7, 7, dtype=torch.float16).softmax(-1)
    grad, bias = randn(6, heads, 7, 7, dtype=torch.float16), randn(heads, 7, 7)
    config = SoftmaxConfig(8, 8, 1, paired=True, programs_per_multiprocessor=programs)
    dx, dbias = gradients(grad, y, bias, config)
    p, g = y.double(), grad.double()
    ds = p * (g - (p * g).sum(-1, keepdim=True))
    assert torch.allclose(dx.double(), 0.5 * ds, atol=1e-3)
    assert torch.allclose(dbias.double(), ds.sum(0), atol=1e-5)


@pytest.mark.parametrize("heads", [2, 3], ids=["even rows", "odd rows"])
def test_loading_ahead_changes_no_bit(heads, randn):
    """Runs of one, of several and of a ragged last number of loop positions."""
    x, bias = randn(4, 2, heads, 5, 5, dtype=torch.float16), randn(heads, 5, 5)
    mask, grad = randn(2, 1, 5, 5), randn(4, 2, heads, 5, 5, dtype=torch.float16)
    for steps in (1, 3):
        cut = {"steps": steps, "programs_per_multiprocessor": 0.01, "paired": True}
        plain, ahead = (SoftmaxConfig(8, 8, 1, **cut, ahead=ahead) for ahead in (False, True))
        y, same = (
            masked_softmax_fwd(x, bias, mask, None, 1.0, False, config=config)
            for config in (plain, ahead)
        )
        assert torch.equal(y, same)
        needs = (True, True, False)
        first, second = (
            masked_softmax_bwd(grad, y, bias, None, None, 0.5, False, needs, config=config)[:2]
            for config in (plain, ahead)
        )
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rows_without_pairs_are_refused_where_pairs_are_asked_for(randn):
    y, config = randn(3, 3, 7, 7, dtype=torch.float16), SoftmaxConfig(8, 8, 1, paired=True)
    with pytest.raises(ValueError, match="paired does not apply: 21 rows are no whole number"):
        masked_softmax_bwd(
            y, y, randn(3, 7, 7), None, None, 1.0, False, (True, True, False), config=config
        )


@pytest.mark.parametrize("kept", [0, 2, 5], ids=lambda kept: f"{kept} of 4 chunks kept")
@pytest.mark.parametrize(
    ("keys", "dtype"),
    [(1000, torch.float16), (1001, torch.float16), (1000, torch.float32)],
    ids=str,
)
def test_long_rows_keep_any_number_of_chunks(keys, dtype, kept, randn):
    y, grad = randn(3, keys, dtype=dtype).softmax(-1), randn(3, keys, dtype=dtype)
    dx = gradients(grad, y, None, SoftmaxConfig(1, 256, 1, long=True, kept=kept))[0]
    ds = y.double() * (grad.double() - (y.double() * grad.double()).sum(-1, keepdim=True))
    assert torch.allclose(dx.double(), 0.5 * ds, atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [(0, 3, 7, 7), (2, 3, 0, 7), (2, 3, 7, 0), (2, 0, 7, 7)],
    ids=["batch 0", "queries 0", "keys 0", "heads 0"],
)
@pytest.mark.parametrize("impl", ["triton", "reference", "auto"])
def test_empty(shape, impl, randn):
    x = randn(*shape).requires_grad_()
    bias = randn(1, *shape[1:]).requires_grad_()
    mask = torch.zeros(shape[0], 1, *shape[2:], dtype=torch.bool, device=x.device)
    y = masked_softmax(x, bias=bias, mask=mask, impl=impl)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    dx, dbias = torch.autograd.grad(y, (x, bias), torch.ones_like(y))
    assert dx.shape == x.shape
    assert torch.equal(dbias, torch.zeros_like(bias))
