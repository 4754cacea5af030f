"""The public function on a CPU: semantics of the definition, messages, reasons."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from library_linear_cases import FP8, operand

from fastswin import ops
from fastswin.ops.library_linear import library_linear_blocker
from fastswin.testing.tolerance import assert_close_to_oracle

HALF = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("residual", ["none", "apart", "in place"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_half_precision_against_the_oracle(dtype, residual, has_bias):
    x, weight = operand((3, 5, 48), dtype, 1), operand((40, 48), dtype, 2)
    bias = operand((40,), dtype, 3) if has_bias else None
    stream = operand((3, 5, 40), dtype, 4)
    oracle = F.linear(x.double(), weight.double())
    eager = F.linear(x, weight, bias)
    if has_bias:
        oracle = oracle + bias.double()
    epilogue = {}
    if residual != "none":
        oracle, eager = oracle + stream.double(), eager + stream
        epilogue["residual"] = stream
    if residual == "in place":
        epilogue["out"] = stream
    y = ops.library_linear(x, weight, bias, **epilogue)
    if residual == "in place":
        assert y.data_ptr() == stream.data_ptr()
    assert_close_to_oracle(y, eager, oracle, dtype)


def fp8_case(M=6, N=32, K=64):
    x, weight = operand((M, K), FP8, 1), operand((N, K), FP8, 2)
    bias, scale = operand((N,), torch.float16, 3), torch.tensor([0.03])
    product = 0.03 * (x.double() @ weight.double().T) + bias.double()
    return x, weight, bias, scale, product


@pytest.mark.parametrize("out_dtype", HALF, ids=str)
def test_fp8_to_half_precision(out_dtype):
    x, weight, bias, scale, product = fp8_case()
    bias = bias.to(out_dtype)
    product = product - fp8_case()[2].double() + bias.double()
    stream = operand((6, 32), out_dtype, 4)
    y = ops.library_linear(x, weight, bias, scale=scale, residual=stream, out=stream.clone())
    assert y.dtype == out_dtype
    torch.testing.assert_close(y.double(), product + stream.double(), rtol=8e-3, atol=1e-3)


def test_fp8_to_fp8_with_gelu():
    x, weight, bias, scale, product = fp8_case()
    step = torch.tensor([0.004])
    made = {"scale": scale, "activation": "gelu", "out_dtype": FP8}
    y = ops.library_linear(x, weight, bias, output_scale=step, **made)
    same = ops.library_linear(x, weight, bias, output_inverse=1 / step, **made)
    assert y.dtype == FP8
    expected = F.gelu(product, approximate="tanh") / 0.004
    torch.testing.assert_close(y.double(), expected.clamp(-448, 448), rtol=0.0626, atol=2**-9)
    torch.testing.assert_close(same.double(), y.double(), rtol=0.126, atol=2**-9)


def test_fp8_output_saturates_and_keeps_nan():
    """A plain cast makes NaN of what is beyond 464; a calibrated range is exceeded now and then."""
    x = torch.tensor([[448.0] * 16, [-448.0] * 16, [float("nan")] * 16]).to(FP8)
    weight = torch.full((16, 16), 448.0).to(FP8)
    y = ops.library_linear(
        x, weight, scale=torch.ones(1), output_inverse=torch.ones(1), out_dtype=FP8
    ).float()
    assert (y[0] == 448).all()
    assert (y[1] == -448).all()
    assert y[2].isnan().all()


def test_scales_per_row_and_channel():
    x, weight, bias, _, _ = fp8_case()
    by_channel, by_row = torch.rand(32) + 0.5, torch.rand(6) + 0.5
    made = {"scale": by_channel, "out_dtype": torch.float16}
    y = ops.library_linear(x, weight, bias, row_scale=by_row, **made)
    columns = ops.library_linear(x, weight, bias, row_scale=by_row.view(6, 1), **made)
    product = x.double() @ weight.double().T * by_channel.double() * by_row.double()[:, None]
    torch.testing.assert_close(y.double(), product + bias.double(), rtol=1e-3, atol=1e-3)
    assert torch.equal(y, columns)


def test_no_rows():
    y = ops.library_linear(torch.zeros(0, 5, 16).half(), torch.zeros(24, 16).half())
    assert y.shape == (0, 5, 24)


def test_gelu_of_the_library_is_off_by_the_documented_amount():
    x = torch.linspace(-6, 6, 100_001, dtype=torch.float64)
    off = (F.gelu(x) - F.gelu(x, approximate="tanh")).abs().max().item()
    assert 4.5e-4 < off < 4.8e-4


HALVES = {"x": torch.zeros(4, 32).half(), "weight": torch.zeros(48, 32).half()}
EIGHTS = {
    "x": torch.zeros(4, 32).to(FP8), "weight": torch.zeros(48, 32).to(FP8),
    "scale": torch.ones(1), "out_dtype": torch.float16,
}  # fmt: skip
TO_FP8 = EIGHTS | {"out_dtype": FP8, "output_inverse": torch.ones(1)}

WRONG = {
    "width": (HALVES | {"x": torch.zeros(4, 31).half()}, "x must end in weight's 32"),
    "weight": (HALVES | {"weight": torch.zeros(48).half()}, r"weight must be \[N, K\]"),
    "mixed": (HALVES | {"weight": torch.zeros(48, 32)}, "weight must be float16 as x is"),
    "bias-size": (HALVES | {"bias": torch.zeros(47).half()}, r"bias must be \[48\]"),
    "bias-dtype": (HALVES | {"bias": torch.zeros(48)}, "bias must be float16 with out_dtype"),
    "bias-fp8": (TO_FP8 | {"bias": torch.zeros(48)}, "bias must be float16 or bfloat16 with"),
    "residual": (HALVES | {"residual": torch.zeros(4, 47).half()}, "residual must be float16"),
    "out": (HALVES | {"out": torch.zeros(5, 48).half()}, r"out must be float16 \(4, 48\)"),
    "no-scale": (EIGHTS | {"scale": None}, "scale must be given with float8"),
    "scale": (HALVES | {"scale": torch.ones(1)}, "scale must be given with float8"),
    "scales": (EIGHTS | {"scale": torch.ones(48)}, "scale must be float32 with 1 elements"),
    "double": (EIGHTS | {"scale": torch.ones(1).double()}, "scale must be float32 with 1"),
    "row-scale": (
        EIGHTS | {"scale": torch.ones(48), "row_scale": torch.ones(5)},
        "row_scale must be float32 with 4 elements",
    ),
    "row-scale-fp8": (
        TO_FP8 | {"scale": torch.ones(48), "row_scale": torch.ones(4)},
        "row_scale needs out_dtype float16 or bfloat16",
    ),
    "no-out-dtype": (EIGHTS | {"out_dtype": None}, "out_dtype must be given for float8"),
    "no-output-scale": (TO_FP8 | {"output_inverse": None}, "one of output_scale and output_inv"),
    "both": (TO_FP8 | {"output_scale": torch.ones(1)}, "one of output_scale and output_inverse"),
    "output-scale": (EIGHTS | {"output_scale": torch.ones(1)}, "and neither otherwise"),
    "gelu": (HALVES | {"activation": "gelu"}, "tanh form and needs out_dtype float8_e4m3fn"),
    "relu": (TO_FP8 | {"activation": "relu"}, "activation must be None or 'gelu', got 'relu'"),
    "residual-fp8": (
        TO_FP8 | {"residual": torch.zeros(4, 48).to(FP8)}, "residual needs out_dtype float16",
    ),
    "config": (HALVES | {"config": -1}, "config must be None or an index"),
    "impl": (HALVES | {"impl": "triton"}, "impl must be one of"),
}  # fmt: skip


@pytest.mark.parametrize(("made", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_are_named(made, message):
    with pytest.raises(ValueError, match=message) as caught:
        ops.library_linear(**made)
    assert "\n" not in str(caught.value)


def test_library_on_a_cpu_is_refused_with_the_reason():
    with pytest.raises(RuntimeError, match="impl='library' cannot run here: device cpu is not"):
        ops.library_linear(**HALVES, impl="library")


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "sizes", "reason"),
    [
        (torch.float32, None, {}, "dtype float32 is not one of"),
        (torch.float16, torch.bfloat16, {}, "float16 operands store float16, not bfloat16"),
        (torch.float16, FP8, {}, "float16 operands store float16, not float8_e4m3fn"),
        (FP8, torch.float32, {}, "out_dtype float32 is not one of"),
        (FP8, FP8, {"K": 24}, "24 input channels in fp8 are not a multiple of 16"),
        (FP8, None, {"N": 15}, "15 output channels in fp8 are not a multiple of 16"),
        (torch.float16, None, {"K": 0}, "a product without input channels"),
    ],
    ids=["fp32", "mixed", "fp16-to-fp8", "fp8-to-fp32", "input", "output", "no-input"],
)
def test_formats_without_a_kernel_have_a_reason(dtype, out_dtype, sizes, reason):
    found = library_linear_blocker(torch.device("cuda"), dtype, out_dtype, **sizes)
    assert reason in found


def test_a_product_without_input_channels_is_the_bias():
    bias = operand((5,), torch.float16, 3)
    y = ops.library_linear(torch.ones(2, 3, 0).half(), torch.ones(5, 0).half(), bias)
    assert torch.equal(y, bias.expand(2, 3, 5))


@pytest.mark.parametrize("shape", [(), (1, 1, 1)], ids=["number", "three-axes"])
def test_shapes_of_one_factor_do_not_become_the_results(shape):
    x, weight = operand((4, 32), FP8, 1), operand((16, 32), FP8, 2)
    expected, found = (
        ops.library_linear(
            x, weight, scale=torch.full(size, 0.5), output_inverse=torch.full(size, 2.0),
            out_dtype=FP8,
        )
        for size in ((1,), shape)
    )  # fmt: skip
    assert found.shape == (4, 16)
    assert torch.equal(found.float(), expected.float())


def test_a_factor_a_channel_may_be_a_column():
    x, weight = operand((16, 32), FP8, 1), operand((16, 32), FP8, 2)
    factors, rows = torch.arange(1.0, 17.0), torch.ones(16)
    expected, found = (
        ops.library_linear(x, weight, scale=scale, row_scale=rows, out_dtype=torch.float16)
        for scale in (factors, factors[:, None])
    )
    assert torch.equal(found, expected)


def test_odd_channels_in_fp8_fall_back_to_the_reference():
    y = ops.library_linear(
        operand((4, 24), FP8, 1), operand((15, 24), FP8, 2), scale=torch.ones(1),
        out_dtype=torch.float16,
    )  # fmt: skip
    assert y.shape == (4, 15)
    assert y.isfinite().all()


def test_gradients_are_refused_by_the_kernel_and_given_by_the_reference():
    x, weight = operand((4, 32), torch.float16, 1), operand((48, 32), torch.float16, 2)
    weight.requires_grad_()
    ops.library_linear(x, weight).float().sum().backward()
    expected = x.float().sum(0).expand(48, 32)
    torch.testing.assert_close(weight.grad.float(), expected, rtol=1e-2, atol=1e-2)
