"""8-bit operators at real sizes on a card: every shipped launch three times bitwise, then right."""

from __future__ import annotations

import pytest
import torch

from fastswin import ops
from fastswin.bench.op_library_linear_problems import Layer
from fastswin.bench.op_quantized_problems import Operands, default_config, quantized_layers
from fastswin.ops.quantize.reference import LARGEST
from fastswin.testing.steps import beyond_one_step

pytestmark = pytest.mark.gpu

FORMATS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def shipped_launches() -> list[tuple[Layer, str]]:
    """One layer for each launch that the heuristic makes for Swin-T, B and L at batches 1 to 32."""
    found = {}
    for layer in quantized_layers(["T", "B", "L"], [32, 8, 1]):
        for format in FORMATS:
            key = layer.kind, format, default_config(layer, format)
            found.setdefault(key, (layer, format))
    return list(found.values())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(
    ("layer", "format"), shipped_launches(), ids=lambda v: getattr(v, "kind", v)
)
def test_shipped_launches(layer, format, device, record_property):
    operands = Operands.make(layer, format, device)
    runs = []
    for _ in range(3):
        operands.reset()
        runs.append(operands.call(default_config(layer, format)).clone())
    assert same_bits(runs[0], runs[1])
    assert same_bits(runs[0], runs[2])
    expected = operands.expected()
    assert operands.wrong(expected) == ""
    if operands.output_scale is not None and format == "fp8":
        limit = LARGEST[operands.out.dtype]
        far = beyond_one_step(operands.out, expected.clamp(-limit, limit).to(operands.out.dtype))
        record_property("beyond_one_step", f"{far:.2e}")
        print(f"{layer.case} {layer.kind} K {layer.K}: {far:.2e} of the RMS beyond one step")


@pytest.mark.parametrize("shape", [(25088, 1152, 384), (1568, 768, 3072)], ids=str)
def test_int8_sums_are_exact_at_real_sizes(shape, device):
    M, N, K = shape
    generator = torch.Generator(device).manual_seed(1)
    x, weight = (
        torch.randint(-127, 128, (rows, K), generator=generator, device=device, dtype=torch.int8)
        for rows in (M, N)
    )
    one = torch.ones(N, device=device)
    found = ops.quantized_linear(x, weight, one, out_dtype=torch.float32, impl="triton")
    assert torch.equal(found, (x.double() @ weight.double().t()).float())


def test_fp8_saturates_and_keeps_nan(device):
    x = torch.tensor([1e6, -1e6, 449.0, float("inf"), -float("inf"), float("nan")], device=device)
    found = ops.quantize(x, torch.ones(1, device=device), torch.float8_e4m3fn, impl="triton")
    wanted = torch.tensor([448.0, -448.0, 448.0, 448.0, -448.0, float("nan")], device=device)
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", FORMATS)
def test_a_chain_in_a_cuda_graph(format, device):
    """Norm, qkv, attention, proj and MLP: a replay gives the bits of the plain calls."""
    torch.manual_seed(0)
    C, heads, dtype = 96, 3, FORMATS[format]
    x = torch.randn(4, 56, 56, C, device=device).half()
    step = torch.full((1,), 0.03 if format == "int8" else 0.01, device=device)

    def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        q, rows = ops.quantize_per_token(torch.randn(n, k, device=device) * k**-0.5, dtype)
        return q, rows * step

    qkv, proj, fc1, fc2 = weight(3 * C, C), weight(C, C), weight(4 * C, C), weight(C, 4 * C)
    bias = torch.randn(heads, 49, 49, device=device)

    def block(x: torch.Tensor) -> torch.Tensor:
        h = ops.layer_norm(x, output_scale=step, out_dtype=dtype)
        h = ops.quantized_linear(h, *qkv, output_scale=step.repeat(3))
        h = ops.quantized_window_attention(
            h, num_heads=heads, window_size=(7, 7), shift_size=(3, 3), bias=bias,
            qkv_scale=step.repeat(3), output_scale=step, out_dtype=dtype,
        )  # fmt: skip
        x = ops.quantized_linear(h, *proj, residual=x)
        h = ops.layer_norm(x, output_scale=step, out_dtype=dtype)
        h = ops.quantized_linear(h, *fc1, activation="gelu", output_scale=step)
        return ops.quantized_linear(h, *fc2, residual=x)

    wanted = block(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = block(x)
    for _ in range(3):
        found.zero_()
        graph.replay()
        assert torch.equal(found, wanted)
    assert torch.isfinite(wanted).all()
