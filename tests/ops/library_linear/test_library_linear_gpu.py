"""The library's kernels on a card: every epilogue and format, graphs, streams, threads."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from library_linear_cases import FP8, on, operand

from fastswin import ops
from fastswin.ops.library_linear import library_linear_blocker
from fastswin.ops.library_linear.launch import describe, plan_for
from fastswin.testing.tolerance import assert_close_to_oracle

pytestmark = pytest.mark.gpu

HALF = [torch.float16, torch.bfloat16]
CUDA = torch.device("cuda")

#: M, N, K: what fills the card, what does not, and ragged ones.
HALF_SHAPES = [(25088, 576, 192), (49, 96, 384), (1, 288, 96), (333, 24, 72), (130, 15, 24)]
FP8_SHAPES = [(25088, 576, 192), (1568, 768, 3072), (49, 96, 384), (1, 288, 96), (333, 48, 208)]

#: Fast accumulation of fp8 products: 1e-3 to 2e-3 relative on an H100, and one rounding beside it.
FP8_RMS = 5e-3


def run(**made) -> torch.Tensor:
    return ops.library_linear(**on(CUDA, made), impl="library")


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    wrong = (actual.double() - expected.double()).square().mean()
    return (wrong / expected.double().square().mean()).sqrt().item()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", HALF_SHAPES, ids=str)
@pytest.mark.parametrize("residual", ["none", "apart", "in place"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_half_precision_against_the_oracle(dtype, shape, residual, has_bias):
    M, N, K = shape
    made = {
        "x": operand((M, K), dtype, 1), "weight": operand((N, K), dtype, 2, K**-0.5),
        "bias": operand((N,), dtype, 3) if has_bias else None,
    }  # fmt: skip
    stream = operand((M, N), dtype, 4).to(CUDA)
    made = on(CUDA, made)
    oracle = made["x"].double() @ made["weight"].double().T
    eager = F.linear(made["x"], made["weight"], made["bias"])
    if has_bias:
        oracle = oracle + made["bias"].double()
    if residual != "none":
        oracle, eager = oracle + stream.double(), eager + stream
    results = []
    for _ in range(3):
        into = stream.clone()
        epilogue = {"none": {}, "apart": {"residual": into}, "in place": {"residual": into}}
        if residual == "in place":
            epilogue["in place"]["out"] = into
        results.append(run(**made, **epilogue[residual]))
        assert residual != "apart" or torch.equal(into, stream)
    assert_close_to_oracle(results[0], eager, oracle, dtype)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def fp8_operands(shape, out_dtype, bias_dtype=None):
    M, N, K = shape
    made = {
        "x": operand((M, K), FP8, 1), "weight": operand((N, K), FP8, 2),
        "bias": operand((N,), bias_dtype or out_dtype, 3),
        "scale": torch.tensor([K**-0.5]), "out_dtype": out_dtype,
    }  # fmt: skip
    made = on(CUDA, made)
    product = made["scale"].double() * (made["x"].double() @ made["weight"].double().T)
    return made, product + made["bias"].double()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", FP8_SHAPES, ids=str)
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "in-place-residual"])
def test_fp8_to_half_precision(dtype, shape, residual):
    made, oracle = fp8_operands(shape, dtype)
    stream = operand((shape[0], shape[1]), dtype, 4).to(CUDA)
    results = []
    for _ in range(3):
        into = stream.clone()
        results.append(run(**made, **({"residual": into, "out": into} if residual else {})))
    if residual:
        oracle = oracle + stream.double()
    assert relative_rms(results[0], oracle) < FP8_RMS
    bound = 0.02 * oracle.square().mean().sqrt() + torch.finfo(dtype).eps * oracle.abs()
    assert ((results[0].double() - oracle).abs() <= bound).all()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("bias_dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", FP8_SHAPES, ids=str)
@pytest.mark.parametrize("gelu", [False, True], ids=["plain", "gelu"])
def test_fp8_to_fp8(bias_dtype, shape, gelu):
    """One step of e4m3 (1/8 to 1/16 of the value) and what fast accumulation adds."""
    made, oracle = fp8_operands(shape, FP8, bias_dtype)
    made |= {"activation": "gelu" if gelu else None}
    if gelu:
        oracle = F.gelu(oracle, approximate="tanh")
    step = oracle.abs().max().float().view(1) / 448
    results = [run(**made, output_inverse=1 / step) for _ in range(3)]
    results.append(run(**made, output_scale=step))
    stored = results[0].double() * step.double()
    bound = oracle.abs() / 15 + 0.02 * oracle.square().mean().sqrt() + step * 2**-9
    assert ((stored - oracle).abs() <= bound).all()
    assert relative_rms(stored, oracle) < 0.035  # rounding to 3 bits of mantissa: 0.026
    for other in results[1:]:
        assert torch.equal(results[0].view(torch.uint8), other.view(torch.uint8))


def test_fp8_output_saturates():
    x = torch.full((64, 64), 448.0).to(FP8)
    y = run(
        x=x, weight=torch.cat([x.float(), -x.float()]).to(FP8), scale=torch.ones(1),
        output_inverse=torch.ones(1), out_dtype=FP8,
    ).float()  # fmt: skip
    assert (y[:, :64] == 448).all()
    assert (y[:, 64:] == -448).all()


def test_fp8_scales_per_row_and_channel():
    if reason := library_linear_blocker(CUDA, FP8, by_channel=True):
        with pytest.raises(RuntimeError, match="row_scale needs cuBLAS"):
            run(**rowwise()[0])
        assert "row_scale" in reason
        return
    made, oracle = rowwise()
    assert relative_rms(run(**made), oracle) < FP8_RMS


def rowwise():
    made, _ = fp8_operands((333, 96, 208), torch.bfloat16)
    generator = torch.Generator().manual_seed(5)
    made["scale"] = (torch.rand(96, generator=generator) + 0.5).to(CUDA)
    made["row_scale"] = (torch.rand(333, generator=generator) + 0.5).to(CUDA)
    product = made["x"].double() @ made["weight"].double().T
    product = product * made["scale"].double() * made["row_scale"].double()[:, None]
    return made, product + made["bias"].double()


def in_place_case(M=1568, N=384, K=1536):
    made = {
        "x": operand((M, K), torch.float16, 1), "weight": operand((N, K), torch.float16, 2, 0.03),
        "bias": operand((N,), torch.float16, 3),
    }  # fmt: skip
    return on(CUDA, made), operand((M, N), torch.float16, 4).to(CUDA)


def test_graph_replays_with_new_inputs_and_cleared_caches():
    """Scratch memory of a captured call is the graph's, whatever is cleared meanwhile."""
    made, stream = in_place_case()
    into = stream.clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(**made, residual=into, out=into)  # the search and the kernels' loading
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(2):
            run(**made, residual=into, out=into)
    other = operand((1568, 1536), torch.float16, 9).to(CUDA)
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    filler = [torch.full((1 << 22,), 3e4, device=CUDA).half() for _ in range(8)]
    for x in (made["x"].clone(), other):
        made["x"].copy_(x)
        into.copy_(stream)
        graph.replay()
        expected = stream.clone()
        for _ in range(2):
            run(**made, residual=expected, out=expected)
        assert torch.equal(into, expected)
        assert into.isfinite().all()
    assert all((f == 3e4).all() for f in filler)


def test_graph_of_an_fp8_product_replays():
    made, _ = fp8_operands((1568, 768, 192), FP8, torch.float16)
    made |= {"activation": "gelu", "output_inverse": torch.full((1,), 50.0, device=CUDA)}
    expected = run(**made)
    out = torch.zeros_like(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(**made, out=out)
    graph.replay()
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


def test_runs_on_the_current_stream():
    made, stream = in_place_case()
    expected = run(**made, residual=stream)
    side = torch.cuda.Stream()
    late = torch.zeros_like(made["x"])
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(made["x"])  # a product on any other stream would read zeros
        y = run(**(made | {"x": late}), residual=stream)
    side.synchronize()
    assert torch.equal(y, expected)


def test_second_call_after_cleared_caches():
    made, stream = in_place_case()
    first = run(**made, residual=stream)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.equal(run(**made, residual=stream), first)


def test_threads_share_a_plan():
    """One descriptor, two biases: neither call may see the other's."""
    made, stream = in_place_case(M=49)
    biases = [operand((384,), torch.float16, seed).to(CUDA) for seed in (11, 12)]
    expected = [run(**(made | {"bias": bias}), residual=stream) for bias in biases]
    wrong: list[int] = []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                y = run(**(made | {"bias": biases[index]}), residual=stream)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(y, expected[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_every_algorithm_is_right_and_the_next_is_refused():
    made, stream = in_place_case()
    out = torch.empty_like(stream)
    described = (made["x"], made["weight"], made["bias"], None, None, False, stream, None, out)
    problem, pointers = describe(*described)
    plan = plan_for(problem, torch.cuda.current_device(), pointers)
    assert 1 <= len(plan.algorithms) <= 8
    oracle = made["x"].double() @ made["weight"].double().T + made["bias"].double()
    oracle = oracle + stream.double()
    eager = F.linear(made["x"], made["weight"], made["bias"]) + stream
    for config in range(len(plan.algorithms)):
        y = run(**made, residual=stream, out=out, config=config)
        assert_close_to_oracle(y, eager, oracle, torch.float16)
        assert plan.describe(config)["workspace_bytes"] <= 32 << 20
    with pytest.raises(ValueError, match=f"config must be below {len(plan.algorithms)}"):
        run(**made, residual=stream, config=len(plan.algorithms))


def test_misaligned_rows_are_right():
    """A pointer of 2-byte alignment rules most kernels out; the rest still answer."""
    made, _ = in_place_case(M=65, N=24, K=40)
    memory = torch.zeros(65 * 40 + 1, dtype=torch.float16, device=CUDA)
    moved = memory[1:].view(65, 40).copy_(made["x"])
    torch.testing.assert_close(run(**(made | {"x": moved})), run(**made), rtol=2e-3, atol=2e-3)


def test_auto_takes_the_library():
    made, _ = in_place_case(M=65)
    assert torch.equal(ops.library_linear(**made), run(**made))


def test_no_rows():
    made, _ = in_place_case(M=1)
    assert run(**(made | {"x": made["x"][:0]})).shape == (0, 384)


def test_last_gpu_of_several_while_the_first_is_current():
    made, stream = in_place_case()
    expected = run(**made, residual=stream)
    other = torch.device("cuda", torch.cuda.device_count() - 1)
    y = ops.library_linear(**on(other, made), residual=stream.to(other), impl="library")
    assert y.device == other
    assert torch.equal(y.to(CUDA), expected)
