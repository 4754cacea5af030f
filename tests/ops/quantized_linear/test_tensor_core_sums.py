"""The arithmetic of fp8 tensor cores, which bounds what an fp8 product may lose."""

from __future__ import annotations

import pytest
import torch

from fastswin import ops
from fastswin.testing.tensor_cores import fp8_product
from fastswin.testing.tolerance import compare_to_oracle

FP8 = torch.float8_e4m3fn


def operands(K: int, M: int = 8, N: int = 24, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """e4m3 numbers as an MLP has them behind GELU, where errors of one sign add up."""
    generator = torch.Generator().manual_seed(K)
    x = torch.nn.functional.gelu(torch.randn(M, K, generator=generator) * 2) * 20
    weight = torch.randn(N, K, generator=generator)
    return x.to(device, FP8), weight.to(device, FP8)


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().t()


@pytest.mark.parametrize(
    ("terms", "found"),
    [
        ([1.0, 2.0, 3.5], 6.5),
        ([256.0, 2**-5, 2**-6], 256.03125),  # 2**-5 is the last bit kept beside 2**8
        ([-256.0, -(2**-6)], -256.0),  # cut off towards zero
        ([256.0] + [2**-6] * 31, 256.0),  # each by itself: their sum would be half of one
        ([256.0, 128.0, 128.0, 2**-5], 512.0),  # kept by the step, not by the sum
        ([256.0] + [0.0] * 31 + [2**-6], 256.0),
    ],
    ids=["exact", "last bit", "to zero", "one by one", "carry", "next step"],
)
def test_bits_below_the_largest_are_cut_off(terms, found):
    x = torch.zeros(1, 64)
    x[0, : len(terms)] = torch.tensor(terms)
    assert fp8_product(x.to(FP8), torch.ones(1, 64).to(FP8)).item() == found


def test_loss_grows_with_the_steps():
    lost = []
    for K in (96, 768, 3072):
        x, weight = operands(K)
        oracle = exact(x, weight)
        wrong = fp8_product(x, weight).double() - oracle
        lost.append((wrong.square().mean() / oracle.square().mean()).sqrt().item())
    assert lost[0] < 3e-4 < lost[1] < 1.2e-3 < lost[2] < 3e-3


@pytest.fixture(scope="module")
def long_sums():
    """Operands of 4,096 channels, their product and what tensor cores make of it."""
    x, weight = operands(4096)
    return x, weight, exact(x, weight), fp8_product(x, weight)


@pytest.mark.parametrize("fault", ["a step", "a column", "a factor", "nothing"])
def test_what_is_wrong_is_outside_the_gate(fault, long_sums):
    x, weight, oracle, eager = long_sums
    if fault == "a step":
        wrong = exact(x[:, 32:], weight[:, 32:])
    elif fault == "a column":
        wrong = oracle.roll(1, dims=1)
    else:
        wrong = oracle * (1.01 if fault == "a factor" else 1.0)
    gate = compare_to_oracle(wrong.half(), eager.half(), oracle, torch.float16)
    assert gate.passed is (fault == "nothing")


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() not in ((8, 9), (9, 0)),
    reason="other tensor cores add fp8 products in more bits",
)
@pytest.mark.parametrize("K", [96, 768, 4096])
def test_tensor_cores_add_so(K, record_property):
    """The error that is predicted is the one that is found, element by element."""
    x, weight = operands(K, 256, 192, "cuda")
    one = torch.ones(192, device="cuda")
    found = ops.quantized_linear(x, weight, one, out_dtype=torch.float32, impl="triton")
    predicted, oracle = fp8_product(x, weight), exact(x, weight)
    same = (found == predicted).float().mean().item()
    error, left = found.double() - oracle, found.double() - predicted.double()
    record_property("share_of_equal_results", f"{same:.4f}")
    print(f"K {K}: equal {same:.4f}, error {error.square().mean().sqrt():.3e}, "
          f"of which unexplained {left.square().mean().sqrt():.3e}")  # fmt: skip
    assert left.square().mean() <= 0.25 * error.square().mean()
