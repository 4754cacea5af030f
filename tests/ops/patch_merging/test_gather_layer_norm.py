"""Patch merging's gather and LayerNorm in training: values and every gradient against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastswin import ops
from fastswin.testing.tolerance import assert_close_to_oracle

#: Maps: two exact column parts, one part, padded columns with odd sides, one token.
SHAPES = [(2, 2, 6, 48), (2, 2, 8, 16), (1, 5, 3, 20), (1, 1, 1, 33)]
FORMS = {"norm": 1e-5, "gather only": None}


def inputs(randn, shape, dtype=torch.float32):
    rows = 4 * shape[3]
    return {
        "x": randn(*shape, dtype=dtype, spread=2.0),
        "weight": 1 + randn(rows, spread=0.3),
        "bias": randn(rows, spread=0.3),
    }


def merged(shape):
    B, H, W, C = shape
    return B, (H + 1) // 2, (W + 1) // 2, 4 * C


def run(t, eps, impl, upstream, out_dtype=None, cast=None):
    """Rows and gradients by name; without a norm there is no affine pair."""
    t = {k: (v.to(cast) if cast else v.clone()).requires_grad_() for k, v in t.items()}
    if eps is None:
        t = {"x": t["x"]}
    pair = (t.get("weight"), t.get("bias"))
    out = ops.gather_layer_norm(t["x"], *pair, eps=eps, out_dtype=out_dtype, impl=impl)
    grads = torch.autograd.grad(out, list(t.values()), upstream.to(out.dtype))
    return {"rows": out.detach(), **dict(zip(t, grads, strict=True))}


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.float32), (torch.float32, torch.float16),
     (torch.float16, torch.float16)],
    ids=["fp32", "fp32 map, fp16 rows", "fp16"],
)  # fmt: skip
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_kernels_match_fp64(form, shape, dtypes, randn):
    t, eps = inputs(randn, shape, dtypes[0]), FORMS[form]
    upstream = randn(*merged(shape), dtype=dtypes[1])
    actual = run(t, eps, "triton", upstream, dtypes[1])
    eager = run(t, eps, "reference", upstream, dtypes[1])
    oracle = run(t, eps, "reference", upstream, torch.float64, cast=torch.float64)
    for name, truth in oracle.items():
        assert_close_to_oracle(actual[name], eager[name], truth, eager[name].dtype)
    again = run(t, eps, "triton", upstream, dtypes[1])
    assert all(torch.equal(actual[name], again[name]) for name in actual)


def test_order_of_the_four_neighbours(randn):
    x = torch.arange(2 * 4 * 2, dtype=torch.float32).view(2, 4, 2, 1).to(randn(1).device)
    expected = torch.tensor([[0, 2, 1, 3], [4, 6, 5, 7], [8, 10, 9, 11], [12, 14, 13, 15]])
    for impl in ("triton", "reference"):
        rows = ops.gather_layer_norm(x, eps=None, impl=impl)
        assert torch.equal(rows.view(4, 4).cpu(), expected.float())


def test_the_definition(randn):
    """As the official PatchMerging writes it."""
    t = inputs(randn, (2, 4, 6, 24))
    x = t["x"]
    y = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
    expected = F.layer_norm(y, (96,), t["weight"], t["bias"])
    actual = ops.gather_layer_norm(*t.values(), impl="reference")
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_only_asked_gradients_are_made(wanted, randn):
    shape = (2, 3, 4, 16)
    t = inputs(randn, shape)
    upstream = randn(*merged(shape))
    everything = run(t, 1e-5, "triton", upstream)
    part = {k: v.clone().requires_grad_(k == wanted) for k, v in t.items()}
    ops.gather_layer_norm(*part.values(), impl="triton").backward(upstream)
    assert {k for k, v in part.items() if v.grad is not None} == {wanted}
    assert torch.equal(part[wanted].grad, everything[wanted])


def test_other_layouts_and_an_empty_batch(randn):
    t = inputs(randn, (2, 4, 6, 16))
    upstream = randn(*merged((2, 4, 6, 16)))
    expected = run(t, 1e-5, "triton", upstream)
    turned = t | {"x": t["x"].permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)}
    moved = upstream.transpose(1, 2).contiguous().transpose(1, 2)
    actual = run(turned, 1e-5, "triton", moved)
    assert all(torch.equal(actual[k], expected[k]) for k in expected)
    empty = run(inputs(randn, (0, 4, 6, 16)), 1e-5, "triton", randn(0, 2, 3, 64))
    assert empty["x"].shape == (0, 4, 6, 16)
    assert torch.equal(empty["weight"], torch.zeros(64))


def test_reference_gradcheck_and_no_second_derivative(randn):
    t = {k: v.double().requires_grad_() for k, v in inputs(randn, (1, 3, 2, 1)).items()}

    def f(*tensors):
        return ops.gather_layer_norm(*tensors, impl="reference")

    assert torch.autograd.gradcheck(f, tuple(t.values()))
    assert torch.autograd.gradgradcheck(f, tuple(t.values()))
    x = randn(1, 2, 2, 4).requires_grad_()
    out = ops.gather_layer_norm(x, impl="triton")
    (g,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.pow(2).sum().backward()


def test_bad_arguments_are_named(randn):
    x = randn(1, 2, 2, 4)
    with pytest.raises(ValueError, match=r"x must be \[B, H, W, C\]"):
        ops.gather_layer_norm(x[0])
    with pytest.raises(ValueError, match=r"weight must be \[16\], got \(4,\)"):
        ops.gather_layer_norm(x, randn(4))
    with pytest.raises(ValueError, match="bias must be None where eps is None"):
        ops.gather_layer_norm(x, None, randn(16), eps=None)
    with pytest.raises(TypeError, match="out_dtype must be float16"):
        ops.gather_layer_norm(x, out_dtype=torch.int8)
    with pytest.raises(RuntimeError, match="float64"):
        ops.gather_layer_norm(x.double(), impl="triton")
    with pytest.raises(RuntimeError, match="2049 channels exceed 2048"):
        ops.gather_layer_norm(randn(1, 1, 1, 2049), impl="triton")


def test_registered_operators_and_one_graph(randn):
    t = inputs(randn, (2, 3, 4, 16))
    fwd, bwd = torch.ops.fastswin.gather_layer_norm_fwd, torch.ops.fastswin.gather_layer_norm_bwd
    checks = ("test_schema", "test_faketensor")
    for norm in (True, False):
        arguments = (*t.values(), 1e-5, norm, torch.float16)
        torch.library.opcheck(fwd.default, arguments, test_utils=checks)
    rows, mean, rstd = fwd(*t.values(), 1e-5, True, torch.float16)
    kept = (t["x"], mean, rstd, t["weight"])
    for needs in ([True, True], [False, True]):
        arguments = (rows, *kept, 3, 4, needs, torch.float32)
        torch.library.opcheck(bwd.default, arguments, test_utils=checks)
    torch._dynamo.reset()
    compiled = torch.compile(ops.gather_layer_norm, fullgraph=True, backend="aot_eager")
    upstream = randn(*merged((2, 3, 4, 16)))
    x = t["x"].clone().requires_grad_()
    compiled(x, t["weight"], t["bias"], impl="triton").backward(upstream)
    assert torch.equal(x.grad, run(t, 1e-5, "triton", upstream)["x"])


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(16, 56, 56, 96), (5, 15, 9, 192), (8, 14, 14, 384)], ids=str)
def test_bf16_on_a_gpu(shape, form, randn):
    t, eps = inputs(randn, shape), FORMS[form]
    upstream = randn(*merged(shape), dtype=torch.bfloat16)
    actual = run(t, eps, "triton", upstream, torch.bfloat16)
    eager = run(t, eps, "reference", upstream, torch.bfloat16)
    oracle = run(t, eps, "reference", upstream, torch.float64, cast=torch.float64)
    for name, truth in oracle.items():
        assert_close_to_oracle(actual[name], eager[name], truth, eager[name].dtype)
    again = run(t, eps, "triton", upstream, torch.bfloat16)
    assert all(torch.equal(actual[name], again[name]) for name in actual)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_projection_that_does_not_keep_the_rows(shape, randn):
    """As the gather and a product of PyTorch's; only x and two numbers a row stay."""
    t = inputs(randn, shape) | {"linear": randn(5, 4 * shape[3])}
    upstream = randn(*merged(shape)[:3], 5)

    def run_with(forward):
        leaves = {k: v.clone().requires_grad_() for k, v in t.items()}
        out = forward(*leaves.values())
        return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), upstream)]

    def separate(x, weight, bias, linear):
        return F.linear(ops.gather_layer_norm(x, weight, bias, impl="triton"), linear)

    def joined(x, weight, bias, linear):
        return ops.gather_layer_norm_linear(x, weight, bias, linear, impl="triton")

    for a, b in zip(run_with(joined), run_with(separate), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    kept = []
    leaves = [v.clone().requires_grad_() for v in t.values()]
    with torch.autograd.graph.saved_tensors_hooks(lambda s: kept.append(s.numel()) or s, id):
        joined(*leaves)
    rows = leaves[0].numel() // shape[3]
    assert sum(kept) <= leaves[0].numel() + 2 * rows + sum(v.numel() for v in leaves[1:])


def test_projection_of_another_width(randn):
    x = randn(1, 2, 2, 4)
    with pytest.raises(ValueError, match=r"linear_weight must be \[K, 16\]"):
        ops.gather_layer_norm_linear(x, None, None, randn(3, 8))
