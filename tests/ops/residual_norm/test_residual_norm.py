"""Residual add and LayerNorm: values and every gradient of the kernels against fp64."""

from __future__ import annotations

import itertools

import pytest
import torch

from fastswin import ops
from fastswin.testing.tolerance import assert_close_to_oracle

#: (shape, channels): two exact column parts, one, padded; odd and single rows; several images.
SHAPES = [(3, 5, 7, 96), (4, 1, 1, 24), (1, 1, 1, 33), (2, 9, 384)]
FORMS = ["residual_add", "add_layer_norm", "norm_only", "layer_norm_add"]


def inputs(randn, shape, x_dtype, branch_dtype):
    C = shape[-1]
    return {
        "x": randn(*shape, dtype=x_dtype),
        "branch": randn(*shape, dtype=branch_dtype, spread=2.0),
        "weight": 1 + randn(C, spread=0.3),
        "bias": randn(C, spread=0.3),
        "branch_bias": randn(C, spread=0.5),
        "branch_scale": (randn(shape[0]) > 0).float() * 1.25,
    }


def call(form, t, impl, **dtypes):
    """Outputs of one form, as a tuple."""
    extra = {"branch_bias": t["branch_bias"], "branch_scale": t["branch_scale"]}
    if form == "residual_add":
        return (ops.residual_add(t["x"], t["branch"], **extra, impl=impl),)
    if form == "layer_norm_add":
        return (
            ops.layer_norm_add(t["x"], t["branch"], t["weight"], t["bias"], **extra, impl=impl),
        )
    if form == "norm_only":
        return ops.add_layer_norm(t["x"], t["weight"], t["bias"], **dtypes, impl=impl)
    return ops.add_layer_norm(
        t["x"], t["weight"], t["bias"], branch=t["branch"], **extra, **dtypes, impl=impl
    )


def leaves(form, t):
    names = ["x", "branch", "weight", "bias", "branch_bias"]
    if form == "residual_add":
        names = ["x", "branch", "branch_bias"]
    if form == "norm_only":
        names = ["x", "weight", "bias"]
    return names


def run(form, t, impl, cotangents, cast=None, **dtypes):
    """Outputs and gradients of every leaf, by name."""
    t = {k: v.to(cast) if cast else v for k, v in t.items()}
    names = leaves(form, t)
    for name in names:
        t[name] = t[name].clone().requires_grad_()
    out = call(form, t, impl, **dtypes)
    grads = torch.autograd.grad(
        out, [t[n] for n in names], [c.to(o.dtype) for c, o in zip(cotangents, out, strict=False)]
    )
    named = dict(zip(names, grads, strict=True))
    return dict(enumerate(o.detach() for o in out)) | named


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.float16),
        (torch.float16, torch.float16),
    ],
    ids=["fp32", "fp32 stream, fp16 branch", "fp16"],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_kernels_match_fp64(form, shape, dtypes, randn):
    t = inputs(randn, shape, *dtypes)
    cotangents = [randn(*shape, dtype=dtypes[0]), randn(*shape, dtype=dtypes[1])]
    options = {"norm_dtype": dtypes[1]} if form in ("add_layer_norm", "norm_only") else {}
    actual = run(form, t, "triton", cotangents, **options)
    eager = run(form, t, "reference", cotangents, **options)
    wide = dict.fromkeys(options, torch.float64)
    oracle = run(form, t, "reference", cotangents, cast=torch.float64, **wide)
    for name, truth in oracle.items():
        assert_close_to_oracle(actual[name], eager[name], truth, eager[name].dtype)
    again = run(form, t, "triton", cotangents, **options)
    assert all(torch.equal(actual[name], again[name]) for name in actual)


@pytest.mark.parametrize("form", ["residual_add", "add_layer_norm", "layer_norm_add"])
def test_only_asked_gradients_are_made(form, randn):
    t = inputs(randn, (2, 3, 3, 32), torch.float32, torch.float32)
    names = leaves(form, t)
    cotangents = [randn(2, 3, 3, 32), randn(2, 3, 3, 32)]
    everything = run(form, t, "triton", cotangents)
    for count in (0, 1, 2):
        for wanted in itertools.combinations(names, count):
            part = {k: v.clone().requires_grad_(k in wanted) for k, v in t.items()}
            out = call(form, part, "triton")
            if not wanted:
                assert not any(o.requires_grad for o in out)
                continue
            torch.autograd.backward(
                [o for o in out if o.requires_grad],
                [c for o, c in zip(out, cotangents, strict=False) if o.requires_grad],
            )
            for name in names:
                got = part[name].grad
                assert (got is None) == (name not in wanted)
                if got is not None:
                    torch.testing.assert_close(got, everything[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("used", ["stream", "normed"])
def test_one_output_may_stay_unused(used, randn):
    t = inputs(randn, (2, 5, 48), torch.float32, torch.float32)
    index = ["stream", "normed"].index(used)
    grads = []
    for impl in ("triton", "reference"):
        part = {k: v.clone().requires_grad_() for k, v in t.items() if k != "branch_scale"}
        out = call("add_layer_norm", part | {"branch_scale": t["branch_scale"]}, impl)[index]
        out.backward(torch.ones_like(out).cumsum(0))
        grads.append({k: v.grad for k, v in part.items()})
    for name in ("x", "branch", "branch_bias"):
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-5, atol=1e-5)
    assert (grads[0]["weight"] is None) == (grads[1]["weight"] is None)


def layouts(g):
    B, H, W, C = g.shape
    wide = g.new_zeros(B, H, W, 2 * C)
    wide[..., ::2] = g
    return {
        "contiguous": g.clone(),
        "every second element": wide[..., ::2],
        "transposed": g.transpose(1, 2).contiguous().transpose(1, 2),
        "channels first": g.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    }


@pytest.mark.parametrize("form", FORMS)
def test_layouts_of_inputs_and_gradients(form, randn):
    t = inputs(randn, (2, 3, 4, 16), torch.float32, torch.float32)
    upstream = randn(2, 3, 4, 16)
    expected = run(form, t, "triton", [upstream, upstream])
    for name, g in layouts(upstream).items():
        moved = t | {k: layouts(t[k])[name] for k in ("x", "branch")}
        kept = {k: v.clone() for k, v in moved.items()}
        actual = run(form, moved, "triton", [g, g])
        assert all(torch.equal(actual[k], expected[k]) for k in expected), name
        assert all(torch.equal(moved[k], kept[k]) for k in kept), name
    spread = torch.ones((), device=upstream.device).expand(2, 3, 4, 16)
    actual = run(form, t, "triton", [spread, spread])
    expected = run(form, t, "triton", [spread.contiguous()] * 2)
    assert all(torch.equal(actual[k], expected[k]) for k in expected)


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("form", FORMS)
def test_empty_batch_gives_zero_gradients(form, impl, randn):
    t = inputs(randn, (0, 3, 4, 16), torch.float32, torch.float32)
    result = run(form, t, impl, [randn(0, 3, 4, 16)] * 2)
    for name, tensor in result.items():
        assert tensor.shape == (0, 3, 4, 16) or not tensor.any(), name
    for name in set(result) & {"weight", "bias", "branch_bias"}:
        assert result[name].shape == (16,)
        assert torch.equal(result[name], torch.zeros_like(result[name]))


def test_stream_without_a_branch_is_the_input(randn):
    x = randn(2, 3, 16)
    stream, _ = ops.add_layer_norm(x, None, None, impl="triton")
    assert stream.data_ptr() == x.data_ptr()
    assert torch.equal(stream, x)


@pytest.mark.parametrize("form", FORMS)
def test_kernels_refuse_a_second_derivative(form, randn):
    t = inputs(randn, (2, 3, 16), torch.float32, torch.float32)
    t["x"].requires_grad_()
    t["branch"].requires_grad_()
    out = call(form, t, "triton")[-1]
    (g,) = torch.autograd.grad(out.pow(2).sum(), t["x"], create_graph=True)
    if form in ("residual_add", "layer_norm_add"):  # dx is the upstream gradient itself
        g = torch.autograd.grad(out.pow(2).sum() * 1, t["branch"], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.pow(2).sum().backward()


@pytest.mark.parametrize("form", FORMS)
def test_reference_gradcheck(form, randn):
    t = {k: v.double() for k, v in inputs(randn, (2, 1, 3), torch.float32, torch.float32).items()}
    names = leaves(form, t)

    def f(*tensors):
        return call(form, t | dict(zip(names, tensors, strict=True)), "reference")

    arguments = [t[n].clone().requires_grad_() for n in names]
    assert torch.autograd.gradcheck(f, arguments)
    assert torch.autograd.gradgradcheck(f, arguments)


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
def test_layer_norm_has_a_backward(residual, randn):
    t = inputs(randn, (3, 5, 96), torch.float32, torch.float32)
    grads = []
    for impl in ("triton", "reference"):
        x, w, b, r = (t[n].clone().requires_grad_() for n in ("x", "weight", "bias", "branch"))
        y = ops.layer_norm(x, w, b, residual=r if residual else None, impl=impl)
        y.backward(torch.ones_like(y).cumsum(-1))
        grads.append([x.grad, w.grad, b.grad, *([r.grad] if residual else [])])
    for actual, expected in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


BAD = {
    "branch shape": ({"branch": (2, 4, 16)}, ValueError, "branch must be"),
    "branch_bias shape": ({"branch_bias": (15,)}, ValueError, "branch_bias must be"),
    "branch_scale shape": ({"branch_scale": (3,)}, ValueError, "branch_scale must be"),
    "weight shape": ({"weight": (8,)}, ValueError, "weight must be"),
    "x rank": ({"x": (16,), "branch": (16,)}, ValueError, "x must be"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_arguments_are_named(case, randn):
    shapes, error, message = BAD[case]
    t = inputs(randn, (2, 3, 16), torch.float32, torch.float32)
    t |= {name: randn(*shape) for name, shape in shapes.items()}
    with pytest.raises(error, match=message):
        call("add_layer_norm", t, "auto")


def test_other_bad_arguments(randn):
    x = randn(2, 3, 16)
    with pytest.raises(ValueError, match="branch_bias needs a branch"):
        ops.add_layer_norm(x, None, None, branch_bias=randn(16))
    with pytest.raises(TypeError, match="branch must be float16"):
        ops.residual_add(x, x.int())
    with pytest.raises(TypeError, match="norm_dtype must be float16"):
        ops.add_layer_norm(x, None, None, norm_dtype=torch.int8)
    with pytest.raises(RuntimeError, match="float64"):
        ops.residual_add(x.double(), x.double(), impl="triton")


@pytest.mark.parametrize("form", ["norm_only", "layer_norm_add"])
def test_compiles_into_one_graph(form, randn):
    t = inputs(randn, (2, 3, 16), torch.float32, torch.float16)
    upstream = [randn(2, 3, 16)] * 2
    expected = run(form, t, "triton", upstream)
    torch._dynamo.reset()
    names = leaves(form, t)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for name in names:
        t[name] = t[name].clone().requires_grad_()
    out = compiled(form, t, "triton")
    grads = torch.autograd.grad(out, [t[n] for n in names], upstream[: len(out)])
    for name, g in zip(names, grads, strict=True):
        assert torch.equal(g, expected[name]), name


def test_registered_operators(randn):
    t = inputs(randn, (2, 3, 16), torch.float32, torch.float16)
    fwd, bwd = torch.ops.fastswin.residual_norm_fwd, torch.ops.fastswin.residual_norm_bwd
    arguments = (t["x"], t["branch"], t["weight"], t["bias"], t["branch_bias"], t["branch_scale"])
    checks = ("test_schema", "test_faketensor")
    for norm in (0, 1, 2):
        settings = (1e-5, norm, torch.float32, torch.float16)
        torch.library.opcheck(fwd.default, (*arguments, *settings), test_utils=checks)
    stream, normed, mean, rstd = fwd(*arguments, 1e-5, 1, torch.float32, torch.float16)
    torch.library.opcheck(
        bwd.default,
        (stream, normed, stream, mean, rstd, t["weight"], None, t["branch_scale"], 1,
         [True, True, True, True], torch.float32, torch.float16), test_utils=checks,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_bf16_on_a_gpu(form, randn):
    shape = (8, 28, 28, 192)
    t = inputs(randn, shape, torch.float32, torch.bfloat16)
    cotangents = [randn(*shape), randn(*shape, dtype=torch.bfloat16)]
    options = {"norm_dtype": torch.bfloat16} if form in ("add_layer_norm", "norm_only") else {}
    actual = run(form, t, "triton", cotangents, **options)
    eager = run(form, t, "reference", cotangents, **options)
    wide = dict.fromkeys(options, torch.float64)
    oracle = run(form, t, "reference", cotangents, cast=torch.float64, **wide)
    for name, truth in oracle.items():
        assert_close_to_oracle(actual[name], eager[name], truth, eager[name].dtype)
    again = run(form, t, "triton", cotangents, **options)
    assert all(torch.equal(actual[name], again[name]) for name in actual)
