"""What only a GPU can show: real sizes, 64-bit offsets, graphs, streams, devices, repeatability."""

import pytest
import torch
from softmax_oracle import check_against_oracle

from fastswin.ops.masked_softmax import (
    grouped_tril_softmax,
    masked_softmax,
    masked_softmax_,
    scaled_masked_softmax,
    window_softmax,
)
from fastswin.testing.poison import PoisonEmpty

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def marked_scores():
    """More than 2**31 elements: a constant everywhere, a marker at the end of the last row."""

    def make(*shape):
        x = torch.full(shape, 0.5, dtype=torch.float16, device="cuda")
        x[-1, -1, -1, -1] = 4.0
        return x

    yield make
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    "shape",
    [(2500, 8, 384, 384), (270 * 64, 6, 144, 144)],
    ids=["2.9e9 elements", "17280 windows, 2.1e9 elements"],
)
def test_past_2_to_the_31_elements(shape, marked_scores):
    _, heads, n, _ = shape
    x = marked_scores(*shape)
    bias = torch.zeros(heads, n, n, device="cuda", requires_grad=True)
    y = masked_softmax_(x.clone(), bias=None, impl="triton")
    last = torch.full((n,), 0.5, dtype=torch.float64)
    last[-1] = 4.0
    want = last.softmax(-1)
    assert torch.allclose(y[-1, -1, -1].cpu().double(), want, atol=1e-3)
    assert torch.allclose(y[-1, -1, -2].cpu().double(), torch.full((n,), 1 / n).double(), atol=1e-4)
    assert torch.allclose(y[0, 0, 0].cpu().double(), torch.full((n,), 1 / n).double(), atol=1e-4)
    del y
    y = window_softmax(x, bias, impl="triton")
    grad = torch.zeros_like(y)
    grad[-1, -1, -1, -1] = 1.0
    (dbias,) = torch.autograd.grad(y, bias, grad)
    ds = want * ((torch.arange(n) == n - 1).double() - want[-1])
    assert torch.allclose(dbias[-1, -1].cpu().double(), ds, atol=2e-3)
    assert dbias[:-1].abs().max() == 0


def test_more_than_65535_windows(marked_scores):
    x = torch.randn(70000, 2, 7, 7, device="cuda", dtype=torch.float16)
    mask = torch.randn(4, 7, 7, device="cuda")
    bias = torch.randn(2, 7, 7, device="cuda", requires_grad=True)
    y = window_softmax(x, bias, mask, impl="triton")
    tail = window_softmax(x[-8:].double(), bias.double(), mask.double())
    assert torch.allclose(y[-8:].double(), tail, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(64, 64, 4, 49, 49), (16, 64, 3, 49, 49), (8, 64, 4, 144, 144), (4, 16, 2, 64, 64)],
    ids=str,
)  # fmt: skip
def test_window_problems_of_real_size(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
    bias = torch.randn(shape[2:], device="cuda").to(dtype).requires_grad_()
    apart = torch.rand(shape[1], 1, *shape[3:], device="cuda") < 0.3
    mask = torch.zeros(apart.shape, device="cuda").masked_fill(apart, -100.0).requires_grad_()
    grad = torch.randn(shape, device="cuda").to(dtype)
    check_against_oracle(x, bias=bias, mask=mask, grad=grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(4, 16, 1024, 1024), (1, 8, 512, 2048), (2, 3, 7, 4096)], ids=str
)
def test_hide_mask_problems_of_real_size(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
    mask = torch.rand(shape[0], 1, *shape[2:], device="cuda") < 0.3
    mask[0, 0, 1] = True
    grad = torch.randn(shape, device="cuda").to(dtype)
    check_against_oracle(x, mask=mask, scale=0.125, grad=grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [127, 1000, 1024, 5000])
def test_grouped_tril_of_real_size(size, dtype):
    torch.manual_seed(0)
    x = torch.randn(4, 3, size, size, device="cuda").to(dtype).requires_grad_()
    lens = torch.tensor([0, 1, size // 2 + 3, size], device="cuda")
    grad = torch.randn(x.shape, device="cuda").to(dtype)
    check_against_oracle(x, causal=True, seq_lens=lens, grad=grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [16384, 16385, 20001, 32768, 32769, 65536, 131072, 200003])
def test_long_rows_of_real_size(keys, dtype):
    torch.manual_seed(0)
    x = (3 * torch.randn(64, keys, device="cuda")).to(dtype).requires_grad_()
    check_against_oracle(x, grad=torch.randn(64, keys, device="cuda").to(dtype))


def training_step(scores, bias, mask, grad, lens):
    """Forward and backward of all forms, no value read back."""
    x = scores.detach().requires_grad_()
    b = bias.detach().requires_grad_()
    y = window_softmax(x, b, mask, impl="triton")
    z = grouped_tril_softmax(x, lens, impl="triton")
    hidden = scaled_masked_softmax(x, mask[:1, None] < -1, 0.5, impl="triton")
    return (y, z, hidden, *torch.autograd.grad([y, z, hidden], [x, b], [grad] * 3))


@pytest.fixture
def step_inputs():
    torch.manual_seed(1)
    scores, grad = (torch.randn(64, 3, 49, 49, device="cuda") for _ in range(2))
    bias, mask = torch.randn(3, 49, 49, device="cuda"), torch.randn(4, 49, 49, device="cuda")
    lens = torch.randint(0, 50, (64,), device="cuda")
    return scores, bias, mask, grad, lens


def test_cuda_graph_of_forward_and_backward(step_inputs):
    want = training_step(*step_inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        training_step(*step_inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = training_step(*step_inputs)
    for t in results:
        t.detach().fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, want, strict=True))
    step_inputs[0].mul_(2.0)
    graph.replay()
    doubled = training_step(*step_inputs)
    assert all(torch.equal(a, b) for a, b in zip(results, doubled, strict=True))


def test_non_default_stream(step_inputs):
    want = training_step(*step_inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        got = training_step(*step_inputs)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_three_runs_are_bitwise_equal_on_poisoned_memory(step_inputs):
    with PoisonEmpty():
        runs = [training_step(*step_inputs) for _ in range(3)]
    assert all(torch.isfinite(t).all() for t in runs[0])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, runs[0], strict=True))


@pytest.mark.parametrize("heads", [3, 4], ids=["odd rows", "even rows"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_three_runs_of_half_precision_windows_are_bitwise_equal(dtype, heads):
    torch.manual_seed(2)
    scores, grad = (torch.randn(4096, heads, 49, 49, device="cuda").to(dtype) for _ in range(2))
    bias, mask = torch.randn(heads, 49, 49, device="cuda"), torch.randn(64, 49, 49, device="cuda")
    lens = torch.randint(0, 50, (4096,), device="cuda")
    with PoisonEmpty():
        runs = [training_step(scores, bias, mask, grad, lens) for _ in range(3)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, runs[0], strict=True))


@pytest.mark.parametrize("keys", [131072, 131074, 200003])
def test_three_runs_of_long_rows_are_bitwise_equal(keys):
    torch.manual_seed(3)
    x = (3 * torch.randn(300, keys, device="cuda")).half().requires_grad_()
    grad = torch.randn(300, keys, device="cuda").half()
    with PoisonEmpty():
        runs = [torch.autograd.grad(masked_softmax(x, impl="triton"), x, grad) for _ in range(3)]
    p = masked_softmax(x.detach().double())
    ds = p * (grad - (p * grad).sum(-1, keepdim=True))
    assert torch.allclose(runs[0][0].double(), ds, rtol=1e-2, atol=4e-7)
    for other in runs[1:]:
        assert torch.equal(other[0], runs[0][0])


def test_the_device_comes_from_the_tensors(step_inputs):
    """On one GPU this shows that the current device stays; on two, that it is not used."""
    want = training_step(*step_inputs)
    other = torch.device("cuda", torch.cuda.device_count() - 1)
    moved = [t.to(other) for t in step_inputs]
    before = torch.cuda.memory_allocated(0)
    got = training_step(*moved)
    assert torch.cuda.current_device() == 0
    assert all(t.device == other for t in got)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want, strict=True))
    if other.index != 0:
        assert torch.cuda.memory_allocated(0) == before
    with pytest.raises(ValueError, match="bias is on cpu and x on cuda"):
        masked_softmax(moved[0], bias=torch.zeros(49))


def test_cost_does_not_depend_on_a_broadcast_mask(step_inputs):
    """A mask shared by all heads and images is never expanded."""
    x = torch.randn(64, 16, 256, 256, device="cuda", dtype=torch.float16)
    mask = torch.zeros(1, 1, 256, 256, device="cuda", dtype=torch.bool)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    masked_softmax(x, mask=mask, impl="triton")
    assert torch.cuda.max_memory_allocated() - before <= x.nbytes + 2**20
