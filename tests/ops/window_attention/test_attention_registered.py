"""The differentiable operators: schema, fake kernels, compile, autocast, gradients of gradients."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, arguments

from fastswin import ops
from fastswin.ops.window_attention import training

CASES = [
    Case("whole-padded", (5, 4), (3, 4), (1, 2), cosine=True, num_heads=1, batch=1),
    Case("tiles", (8, 9), (8, 9), num_heads=1, batch=1),
]


def operands(case: Case, randn) -> list:
    made = arguments(case, randn, torch.float32)
    tensors = [made.get(n) for n in ("qkv", "bias", "logit_scale", "qkv_bias")]
    return [None if t is None else t.requires_grad_() for t in tensors]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck(case, randn):
    tensors = operands(case, randn)
    options = (0.25, 1, case.window_size, case.shift_size, False, 0.0, case.name != "tiles")
    tiled = case.name == "tiles"
    torch.library.opcheck(training.window_attention, (*tensors, None, *options, tiled))
    detached = [None if t is None else t.detach() for t in tensors]
    out, row_stats = training.window_attention(*detached, None, *options, tiled)
    kept = (out, row_stats) if tiled else (None, None)
    needs = [t is not None for t in tensors]
    torch.library.opcheck(
        training.window_attention_bwd,
        (torch.ones_like(out), detached[0], *kept, *detached[1:], None, *options, needs),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_opcheck_partitioned(randn):
    q, k, v = (randn(2, 1, 6, 16).requires_grad_() for _ in range(3))
    bias, mask = randn(1, 6, 6).requires_grad_(), randn(2, 6, 6) > 0.8
    seed = torch.tensor([3], device=q.device)
    torch.library.opcheck(
        training.window_attention_partitioned,
        (q, k, v, bias, mask, None, seed, 0.25, False, 0.2, False),
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole_graph_compile_of_forward_and_backward(case, randn, device):
    made = arguments(case, randn, torch.float32)
    qkv = made.pop("qkv")
    upstream = randn(1, *case.map_size, 16)

    def attend(x):
        return ops.window_attention(x, **made, impl="triton") * 2

    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    plain, traced = qkv.clone().requires_grad_(), qkv.clone().requires_grad_()
    attend(plain).backward(upstream)
    compiled(traced).backward(upstream)
    torch.testing.assert_close(traced.grad, plain.grad)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_second_order_equals_the_reference(case):
    """SWO-14: gradient penalties, through every tensor."""
    results = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        made = {
            k: v.to(dtype).requires_grad_() if isinstance(v, torch.Tensor) else v
            for k, v in arguments(case, _fixed(), torch.float32).items()
        }
        leaves = [v for v in made.values() if isinstance(v, torch.Tensor)]
        out = ops.window_attention(**made, impl=impl)
        first = torch.autograd.grad(
            out.pow(2).sum(), leaves, create_graph=True, materialize_grads=True
        )
        penalty = sum(g.pow(2).sum() for g in first)
        results.append(torch.autograd.grad(penalty, leaves, materialize_grads=True))
    for ours, truth in zip(*results, strict=True):
        assert (ours.double() - truth).norm() <= 1e-4 * truth.norm() + 1e-6


def _fixed():
    """The same numbers for both dtypes."""
    generator = torch.Generator().manual_seed(3)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def make(*shape, dtype=torch.float32, spread=1.0):
        values = spread * torch.randn(*shape, generator=generator)
        return values.to(device, dtype)

    return make


def test_create_graph_without_a_second_backward(randn):
    qkv = operands(CASES[0], randn)[0]
    out = ops.window_attention(
        qkv, num_heads=1, window_size=(3, 4), shift_size=(1, 2), impl="triton"
    )
    (gradient,) = torch.autograd.grad(out.pow(2).sum(), qkv, create_graph=True)
    assert bool(torch.isfinite(gradient).all())


def test_autocast_changes_nothing_and_backward_runs_outside(randn, device):
    """SWO-16: half-precision qkv, fp32 parameters, fp32 gradients for them."""
    made = arguments(CASES[0], randn, torch.float16)
    made["qkv_bias"] = made["qkv_bias"].float()
    leaves = {k: v.requires_grad_() if isinstance(v, torch.Tensor) else v for k, v in made.items()}
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = ops.window_attention(**leaves, impl="triton")
    assert out.dtype == torch.float16
    out.sum().backward()
    assert leaves["qkv"].grad.dtype == torch.float16
    for name in ("bias", "logit_scale", "qkv_bias"):
        assert leaves[name].grad.dtype == torch.float32


def test_overflow_is_not_hidden(randn):
    """A scaler must see inf or NaN, not zeros."""
    qkv = randn(1, 3, 4, 48, dtype=torch.float16, spread=100.0).requires_grad_()
    out = ops.window_attention(qkv, num_heads=1, window_size=(3, 4), impl="triton")
    out.backward(torch.full_like(out, 6e4))
    assert not bool(torch.isfinite(qkv.grad).all())
