"""Feed-forward layer: values and gradients against fp64, kernel in the interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint

from fastswin import ops
from fastswin.ops.feed_forward import config
from fastswin.testing.tolerance import assert_close_to_oracle

NAMES = ["x", "fc1_weight", "fc1_bias", "fc2_weight"]


def inputs(randn, shape, hidden, dtype, bias=True):
    C = shape[-1]
    return {
        "x": randn(*shape, dtype=dtype, spread=2.0),
        "fc1_weight": randn(hidden, C, dtype=dtype, spread=C**-0.5),
        "fc1_bias": randn(hidden, dtype=dtype) if bias else None,
        "fc2_weight": randn(C, hidden, dtype=dtype, spread=hidden**-0.5),
    }


def run(t, upstream, cast=None, wanted=NAMES, **options):
    t = {k: None if v is None else v.to(cast or v.dtype).clone() for k, v in t.items()}
    wanted = [n for n in wanted if t[n] is not None]
    for name in wanted:
        t[name].requires_grad_()
    y = ops.feed_forward(*t.values(), **options)
    grads = torch.autograd.grad(y, [t[n] for n in wanted], upstream.to(y.dtype))
    return {"y": y.detach()} | dict(zip(wanted, grads, strict=True))


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 24), (1, 1, 16), (37, 40)], ids=str)
def test_gradients_match_fp64(shape, dtype, recompute, randn):
    t = inputs(randn, shape, 4 * shape[-1], dtype, bias=shape[0] != 1)
    upstream = randn(*shape, dtype=dtype)
    actual = run(t, upstream, impl="triton", recompute=recompute)
    eager = run(t, upstream, impl="reference")
    oracle = run(t, upstream, impl="reference", cast=torch.float64)
    for name, truth in oracle.items():
        assert_close_to_oracle(actual[name], eager[name], truth, dtype)
    again = run(t, upstream, impl="triton", recompute=recompute)
    assert all(torch.equal(actual[n], again[n]) for n in actual)


@pytest.mark.parametrize("wanted", [["x"], ["fc1_bias"], ["fc2_weight"], ["fc1_weight", "x"]])
def test_frozen_parts(wanted, randn):
    """As close to fp64 as eager: which kernels a CPU's library takes depends on what is asked."""
    t = inputs(randn, (3, 4, 16), 64, torch.float32)
    upstream = randn(3, 4, 16)
    eager = run(t, upstream, impl="reference")
    oracle = run(t, upstream, impl="reference", cast=torch.float64)
    found = run(t, upstream, impl="triton", wanted=wanted)
    assert set(found) == {"y", *wanted}
    for name, g in found.items():
        assert_close_to_oracle(g, eager[name], oracle[name], torch.float32)


def test_only_the_pre_activation_is_kept(randn):
    t = inputs(randn, (64, 16), 64, torch.float32)
    kept = {}
    for recompute in (True, False):
        elements = 0

        def pack(tensor):
            nonlocal elements
            elements += tensor.numel()
            return tensor

        t["x"].requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            ops.feed_forward(*t.values(), recompute=recompute, impl="triton")
        kept[recompute] = elements
    assert kept[False] - kept[True] == 64 * 64


def test_saturated_and_infinite_activations(randn):
    t = inputs(randn, (4, 16), 64, torch.float32)
    t["fc1_bias"][:4] = torch.tensor([1e4, -1e4, 60.0, -60.0])
    upstream = randn(4, 16)
    actual = run(t, upstream, impl="triton")
    expected = run(t, upstream, impl="reference", cast=torch.float64)
    for name in actual:
        torch.testing.assert_close(actual[name].double(), expected[name], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_empty_batch(impl, randn):
    t = inputs(randn, (0, 4, 16), 64, torch.float32)
    result = run(t, randn(0, 4, 16), impl=impl)
    assert result["y"].shape == result["x"].shape == (0, 4, 16)
    assert not any(result[n].any() for n in ("fc1_weight", "fc1_bias", "fc2_weight"))
    assert result["fc1_bias"].shape == (64,)


def test_layouts_of_the_upstream_gradient(randn):
    t = inputs(randn, (2, 3, 4, 16), 64, torch.float32)
    g = randn(2, 3, 4, 16)
    expected = run(t, g, impl="triton")
    moved = g.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    actual = run(t, moved, impl="triton")
    assert all(torch.equal(actual[n], expected[n]) for n in actual)


def test_autocast_around_the_backward_changes_nothing(randn):
    t = inputs(randn, (3, 4, 16), 64, torch.float16)
    upstream = randn(3, 4, 16, dtype=torch.float16)
    expected = run(t, upstream, impl="triton")
    with torch.autocast(t["x"].device.type, torch.bfloat16, cache_enabled=False):
        t32 = {k: v.clone().requires_grad_() for k, v in t.items()}
        with torch.autocast(t["x"].device.type, enabled=False):
            y = ops.feed_forward(*t32.values(), impl="triton")
        y.backward(upstream)
    for name in NAMES:
        assert torch.equal(t32[name].grad, expected[name]), name


def test_refuses_a_second_derivative(randn):
    t = inputs(randn, (3, 16), 64, torch.float32)
    t["x"].requires_grad_()
    y = ops.feed_forward(*t.values(), impl="triton")
    (g,) = torch.autograd.grad(y.pow(2).sum(), t["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.pow(2).sum().backward()


def test_bad_arguments_are_named(randn):
    t = inputs(randn, (3, 16), 64, torch.float32)
    for name, value, error in (
        ("x", randn(3, 15), ValueError),
        ("x", t["x"].int(), TypeError),
        ("fc1_bias", randn(63), ValueError),
        ("fc2_weight", randn(16, 63), ValueError),
    ):
        with pytest.raises(error, match=f"{name} must be"):
            ops.feed_forward(*(t | {name: value}).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16-fused"])
def test_registered_operators(dtype, randn):
    t = inputs(randn, (3, 5, 32), 128, dtype)
    fused, checks = dtype == torch.float16, ("test_schema", "test_faketensor")
    weights = t["fc1_weight"], t["fc1_bias"], t["fc2_weight"]
    for keep in [0] if fused else [1, 2]:
        torch.library.opcheck(
            torch.ops.fastswin.feed_forward_fwd.default, (t["x"], *weights, keep), test_utils=checks
        )
    pre = None if fused else randn(3, 5, 128)
    torch.library.opcheck(
        torch.ops.fastswin.feed_forward_bwd.default,
        (randn(3, 5, 32, dtype=dtype), t["x"], pre, None, *weights, [True] * 4, torch.float32),
        test_utils=checks,
    )


def narrow(randn, weight_dtype=torch.float32):
    """Half-precision rows under weights as autocast has them: the fused form."""
    t = inputs(randn, (2, 3, 4, 32), 128, weight_dtype)
    t["x"] = t["x"].half()
    return t


def test_nothing_but_the_input_is_kept_when_fused(randn):
    t = narrow(randn)
    kept = []
    t["x"].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda none: none):
        ops.feed_forward(*t.values(), impl="triton")
    assert sum(tensor.numel() for tensor in kept) == t["x"].numel() + 2 * 32 * 128 + 128


def test_wider_weights_get_gradients_of_their_dtype(randn):
    t = narrow(randn)
    upstream = randn(2, 3, 4, 32, dtype=torch.float16)
    actual = run(t, upstream, impl="triton")
    half = {k: v.half() for k, v in t.items()}
    eager = run(half, upstream, impl="reference")
    oracle = run(half, upstream, impl="reference", cast=torch.float64)
    for name, truth in oracle.items():
        assert actual[name].dtype == (t | {"y": t["x"]})[name].dtype
        assert_close_to_oracle(actual[name].half(), eager[name], truth, torch.float16)


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
@pytest.mark.parametrize("forward", ["library", "epilogue"])
def test_wide_layers_may_take_epilogues(forward, recompute, randn, monkeypatch):
    monkeypatch.setattr(config, "WIDE_FORMS", (forward, "epilogue"))
    t = inputs(randn, (3, 4, 24), 96, torch.float16)
    upstream = randn(3, 4, 24, dtype=torch.float16)
    actual = run(t, upstream, impl="triton", recompute=recompute)
    eager = run(t, upstream, impl="reference")
    oracle = run(t, upstream, impl="reference", cast=torch.float64)
    for name, truth in oracle.items():
        assert_close_to_oracle(actual[name], eager[name], truth, torch.float16)


@pytest.mark.parametrize("around", ["checkpoint", "compile", "autocast"])
def test_fused_form_inside_other_tools(around, randn):
    t = narrow(randn)
    upstream = randn(2, 3, 4, 32, dtype=torch.float16)
    expected = run(t, upstream, impl="triton")
    leaves = {k: v.clone().requires_grad_() for k, v in t.items()}

    def layer(x, *weights):
        return ops.feed_forward(x, *weights, impl="triton")

    if around == "checkpoint":
        y = torch.utils.checkpoint.checkpoint(layer, *leaves.values(), use_reentrant=False)
    elif around == "compile":
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
        y = compiled(*leaves.values())
    else:
        with torch.autocast(upstream.device.type, torch.bfloat16):
            y = layer(*leaves.values())
    y.backward(upstream)
    assert torch.equal(y, expected["y"])
    assert all(torch.equal(leaves[n].grad, expected[n]) for n in NAMES)


@pytest.mark.gpu
@pytest.mark.parametrize("C", [96, 128, 192, 384])
def test_bf16_on_a_gpu(C, randn):
    t = inputs(randn, (8, 27, 28, C), 4 * C, torch.bfloat16)
    upstream = randn(8, 27, 28, C, dtype=torch.bfloat16)
    actual = run(t, upstream, impl="triton")
    eager = run(t, upstream, impl="reference")
    oracle = run(t, upstream, impl="reference", cast=torch.float64)
    for name, truth in oracle.items():
        assert_close_to_oracle(actual[name], eager[name], truth, torch.bfloat16)
