"""Rounding to 8 bits: alone, behind LayerNorm, behind the 2x2 gather; static steps and per token.

Kernels are compared with the reference, and the reference with fastswin.quant's own arithmetic. fp8
runs on a GPU only: the interpreter has none.
"""

from __future__ import annotations

import pytest
import torch

from fastswin import ops
from fastswin.ops.quantize.checks import format_blocker
from fastswin.quant import convert, fake_quant, ranges
from fastswin.testing.steps import steps_apart

GPU = torch.cuda.is_available()
FORMATS = {"int8": torch.int8} | ({"fp8": torch.float8_e4m3fn} if GPU else {})
BOTH = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if GPU else [])


def assert_within_one_step(found: torch.Tensor, wanted: torch.Tensor, most: float) -> None:
    """Neighbours at most, and not in more than a share ``most`` of the places."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    off = steps_apart(found, wanted)
    assert int(off.max()) <= 1
    assert (off > 0).float().mean().item() <= most


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def awkward(randn, *shape, dtype=torch.float16):
    """Normal numbers with halves of a step, saturation, infinities, NaN and a row of zeros."""
    x = randn(*shape, dtype=dtype, spread=2.0)
    x.view(-1, shape[-1])[0] = 0.0
    x.view(-1, shape[-1])[1, :6] = torch.tensor([0.5, 1.5, -2.5, 1e4, -1e4, 126.5]) / 64
    x.view(-1, shape[-1])[2, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    return x


@pytest.mark.parametrize("format", BOTH)
def test_reference_is_the_quant_packages_arithmetic(format, randn):
    x, amax = randn(40, 24).float() * 3, 5.3
    scale = ranges.scale_of(amax, format)
    ours = ops.quantize(x, torch.tensor([scale], device=x.device), BOTH[format], impl="reference")
    theirs = convert.quantize_(x * ranges.inverse_of(scale), format)
    assert torch.equal(ours.float(), theirs)
    ours, steps = ops.quantize_per_token(x, BOTH[format], impl="reference")
    theirs = fake_quant.token_scale(x, format)
    assert torch.equal(steps[:, None], theirs)
    assert torch.equal(ours.float(), convert.quantize_(x * theirs.reciprocal(), format))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 24), (4, 48), (2000, 6)], ids=str)
@pytest.mark.parametrize("parts", [1, 3])
def test_quantize(shape, dtype, format, parts, randn):
    x = awkward(randn, *shape, dtype=dtype)
    scale = torch.tensor([1 / 64, 0.05, 0.5][:parts], device=x.device)
    found = ops.quantize(x, scale, FORMATS[format], impl="triton")
    assert_same(found, ops.quantize(x, scale, FORMATS[format], impl="reference"))
    assert_same(found, ops.quantize(x, scale, FORMATS[format], impl="triton"))


def test_int8_rounds_half_to_even_and_saturates_symmetrically(device):
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.4, 900.0, -900.0], device=device)
    x = torch.cat([x, torch.tensor([float("inf"), -float("inf"), float("nan")], device=device)])
    wanted = torch.tensor([0, 2, 2, 0, -2, 126, 127, 127, -127, 127, -127, 0], device=device)
    for impl in ("triton", "reference"):
        found = ops.quantize(x, torch.ones(1, device=device), torch.int8, impl=impl)
        assert torch.equal(found.long(), wanted)


@pytest.mark.parametrize("format", BOTH)
def test_a_zero_step_keeps_zeros(format, device):
    impl = "triton" if format in FORMATS else "reference"
    x, scale = torch.zeros(4, 8, device=device), torch.zeros(1, device=device)
    assert not ops.quantize(x, scale, BOTH[format], impl=impl).float().any()
    q, steps = ops.quantize_per_token(x, BOTH[format], impl=impl)
    assert not q.float().any()
    assert torch.equal(steps, torch.ones(4, device=device))


@pytest.mark.parametrize("format", FORMATS)
def test_quantize_per_token(format, randn):
    x = awkward(randn, 3, 7, 40)
    found, steps = ops.quantize_per_token(x, FORMATS[format], impl="triton")
    # on the CPU: a GPU divides by a number as it multiplies with its rounded inverse
    wanted, wanted_steps = ops.quantize_per_token(x.cpu(), FORMATS[format], impl="reference")
    wanted, wanted_steps = wanted.to(x.device), wanted_steps.to(x.device)
    torch.testing.assert_close(steps, wanted_steps, rtol=0, atol=0, equal_nan=True)
    assert_same(found, wanted)
    assert torch.isnan(steps.flatten()[2])  # a row with NaN says so in its step


def test_quantize_of_a_view_into_a_given_tensor(randn):
    x = randn(12, 10).t()
    out = torch.full((10, 12), 99, dtype=torch.int8, device=x.device)
    scale = torch.full((1,), 0.02, device=x.device)
    assert ops.quantize(x, scale, torch.int8, out=out, impl="triton") is out
    assert_same(out, ops.quantize(x.contiguous(), scale, torch.int8, impl="reference"))
    strided = torch.zeros(10, 24, dtype=torch.int8, device=x.device)[:, ::2]
    ops.quantize(x, scale, torch.int8, out=strided, impl="triton")
    assert_same(strided.contiguous(), out)


def test_empty(device):
    x, scale = torch.zeros(0, 8, device=device), torch.ones(1, device=device)
    assert ops.quantize(x, scale, torch.int8, impl="triton").shape == (0, 8)
    assert ops.layer_norm(x, output_scale=scale, impl="triton").shape == (0, 8)
    assert ops.quantize_per_token(x, torch.int8, impl="triton")[1].shape == (0,)
    assert ops.layer_norm_per_token(x, impl="triton")[1].shape == (0,)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("channels", [24, 96, 128, 100])
@pytest.mark.parametrize("extras", ["plain", "affine", "offset"])
def test_layer_norm(channels, extras, format, randn):
    x = awkward(randn, 37, channels)
    made = {"offset": randn(channels)} if extras == "offset" else {}
    if extras == "affine":
        made = {"weight": 1 + 0.3 * randn(channels), "bias": randn(channels)}
    made |= {"output_scale": torch.full((1,), 0.03, device=x.device), "out_dtype": FORMATS[format]}
    found = ops.layer_norm(x, **made, impl="triton")
    assert_same(found, ops.layer_norm(x, **made, impl="triton"))
    assert_within_one_step(found, ops.layer_norm(x, **made, impl="reference"), 0.01)
    token = {k: v for k, v in made.items() if k not in ("output_scale", "out_dtype")}
    found, steps = ops.layer_norm_per_token(x, **token, dtype=FORMATS[format], impl="triton")
    wanted, wanted_steps = ops.layer_norm_per_token(
        x, **token, dtype=FORMATS[format], impl="reference"
    )
    torch.testing.assert_close(steps, wanted_steps, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert torch.isnan(steps[2])
    assert_within_one_step(found[3:], wanted[3:], 0.01)


def test_layer_norm_of_a_constant_row_is_zero(device):
    x = torch.full((3, 96), 7.5, dtype=torch.float16, device=device)
    found, steps = ops.layer_norm_per_token(x, impl="triton")
    # a GPU's mean of 96 equal numbers may be off by one rounding, which 1 / sqrt(eps) enlarges
    assert (found.float() * steps[:, None]).abs().max() <= 1e-3


def test_an_outlier_saturates_alone(randn):
    """SWO-24: one channel times 500 is clipped, the others keep their resolution."""
    x = randn(49, 128, spread=1.0)
    x[:, 7] *= 500
    scale = torch.full((1,), 4 / 127, device=x.device)
    found = ops.quantize(x, scale, torch.int8, impl="triton").float() * scale
    rest = torch.arange(128, device=x.device) != 7
    torch.testing.assert_close(found[:, rest], x[:, rest].clamp(-4, 4), atol=0.016, rtol=0)
    assert (found[:, 7].abs() > 3.9).float().mean() > 0.9


#: Maps with odd sides and one part of padded channels, with two parts and whole blocks of tokens,
#: with blocks past the end of a map row, and of one token.
MAPS = [(2, 5, 8, 24), (1, 2, 16, 64), (1, 2, 30, 48), (3, 1, 1, 16)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("eps", [None, 1e-5], ids=["gather", "norm"])
@pytest.mark.parametrize("with_offset", [False, True], ids=["plain", "offset"])
@pytest.mark.parametrize("shape", MAPS, ids=str)
def test_gather_neighbours(shape, with_offset, eps, format, randn):
    x = randn(*shape, dtype=torch.float16) + 0.5
    if shape[1] > 1:
        x[0, 1, 1, 3], x[-1, 1, 4, -1] = float("inf"), float("nan")
    B, H, W, C = shape
    merged = B, (H + 1) // 2, (W + 1) // 2
    marks = [torch.full(merged, 7.0, device=x.device) for _ in range(3)]
    made = {
        "layer_norm_eps": eps, "offset": randn(C) if with_offset else None,
        "output_scale": torch.full((1,), 0.03, device=x.device), "out_dtype": FORMATS[format],
    }  # fmt: skip
    impls = ("triton", "triton", "reference")
    found, again, wanted = (
        ops.gather_neighbours(x, **made, marks=m, impl=impl)
        for m, impl in zip(marks, impls, strict=True)
    )
    assert found.shape == (*merged, 4 * C)
    real = marks[2] == 1
    assert int((~real).sum()) == (2 if shape[1] > 1 else 0)
    for m in marks:
        torch.testing.assert_close(m, marks[2], rtol=0, atol=0, equal_nan=True)
    assert_same(found, again)
    assert_within_one_step(found[real], wanted[real], 0.01)


def refused(call, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()


def test_refusals_name_the_argument(device):
    x, one = torch.zeros(4, 8, device=device), torch.ones(1, device=device)
    refused(lambda: ops.quantize(x, one, torch.float16), "dtype must be torch.int8 or")
    refused(lambda: ops.quantize(x, one.half(), torch.int8), "scale must be float32")
    refused(lambda: ops.quantize(x, torch.ones(3, device=device), torch.int8), "3 parts, which do")
    refused(lambda: ops.quantize(x, one, torch.int8, out=x), "out must be torch.int8")
    refused(lambda: ops.quantize_per_token(x, torch.uint8), "dtype must be torch.int8 or")
    refused(lambda: ops.layer_norm(x, out_dtype=torch.int8), "needs output_scale")
    refused(lambda: ops.layer_norm(x, output_scale=one, out_dtype=torch.half), "out_dtype with")
    refused(lambda: ops.layer_norm(x, output_scale=one, residual=x), "exclude each other")
    refused(lambda: ops.layer_norm(x, output_scale=one, out=x), "out must be torch.int8")
    refused(lambda: ops.layer_norm_per_token(x, dtype=torch.half), "dtype must be torch.int8 or")
    image = torch.zeros(1, 4, 4, 8, device=device)
    refused(lambda: ops.gather_neighbours(image, out_dtype=torch.half), "out_dtype must be None or")
    refused(lambda: ops.gather_neighbours(image, marks=one), "marks need output_scale")
    refused(
        lambda: ops.gather_neighbours(image, output_scale=one, marks=one),
        r"marks must be contiguous float32 \(",
    )


def test_fp8_is_refused_by_name_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, one = torch.zeros(4, 8), torch.ones(1)
    with pytest.raises(RuntimeError, match="interpreter has no fp8"):
        ops.quantize(x, one, torch.float8_e4m3fn, impl="triton")
    assert ops.quantize(x, one, torch.float8_e4m3fn).dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("format", "capability", "blocked"),
    [("int8", (8, 0), False), ("int8", (7, 5), True), ("fp8", (8, 9), False),
     ("fp8", (8, 6), True), ("fp8", (9, 0), False)], ids=str,
)  # fmt: skip
def test_a_card_too_old_is_named(format, capability, blocked):
    reason = format_blocker(BOTH[format], capability)
    assert (reason is not None) == blocked
    assert not blocked or "needs compute capability" in reason
