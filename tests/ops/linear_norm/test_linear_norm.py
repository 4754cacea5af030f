"""A product onto the stream with the LayerNorm behind it: fp64 gate, 8 bits, what is refused."""

from __future__ import annotations

import re

import pytest
import torch

from fastswin import ops
from fastswin.ops.linear_norm.config import (
    LinearNormConfig,
    default_linear_norm_config,
    linear_norm_blocker,
    part_width,
)
from fastswin.testing.steps import within_one_step
from fastswin.testing.tolerance import assert_close_to_oracle

DTYPES = [torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
FORMATS = [torch.int8] + ([torch.float8_e4m3fn] if torch.cuda.is_available() else [])

#: (rows, channels, input channels): odd rows, one to four parts, steps that do not divide K.
SHAPES = {
    "96 in three parts": ((19, 96, 96), LinearNormConfig(16, 32, 32, 4, 2)),
    "128 in one": ((5, 128, 40), LinearNormConfig(16, 128, 32, 4, 2)),
    "192 in three": ((70, 192, 64), LinearNormConfig(64, 64, 64, 8, 3, early=True)),
    "128 in four, copy engine": ((33, 128, 64), LinearNormConfig(16, 32, 32, 4, 2, tma=True)),
    "one row of 384": ((1, 384, 48), None),
    "512 of few rows": ((3, 512, 32), None),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_half_precision(name, dtype, randn):
    """The stream in place, bit by bit from run to run; its norm sees it as it was rounded."""
    (M, C, K), config = SHAPES[name]
    x, weight = randn(M, K, dtype=dtype), randn(C, K, dtype=dtype, spread=K**-0.5)
    bias, residual = randn(C), randn(M, C, dtype=dtype, spread=2.0) + 3
    residual *= torch.logspace(-1, 1, M).to(residual)[:, None]
    stream = residual.clone()
    found = ops.linear_add_layer_norm(
        x, weight, bias, residual=stream, out=stream, config=config, impl="triton", pdl=True
    )
    assert found.stream is stream
    again = ops.linear_add_layer_norm(
        x, weight, bias, residual=residual, config=config, impl="triton"
    )
    assert torch.equal(again.stream, stream)
    assert torch.equal(again.normed, found.normed)
    made = x.double(), weight.double(), bias.double()
    oracle = ops.linear_add_layer_norm(*made, residual=residual.double(), impl="reference")
    eager = ops.linear_add_layer_norm(x, weight, bias, residual=residual, impl="reference")
    assert_close_to_oracle(stream, eager.stream, oracle.stream, dtype)
    assert_close_to_oracle(found.normed, eager.normed, oracle.normed, dtype)
    apart = ops.layer_norm(stream, impl="triton")  # one rounding of numbers up to 5
    torch.testing.assert_close(found.normed, apart, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("stored", FORMATS, ids=str)
@pytest.mark.parametrize("steps", ["one step", "a step a row"])
@pytest.mark.parametrize("product", ["wide", "narrow"])
def test_8_bits_within_a_step_of_the_chain(product, steps, stored, randn):
    M, C, K = 21, 96, 64
    residual = randn(M, C, dtype=torch.float16, spread=2.0) + 1
    bias, config = randn(C), LinearNormConfig(16, 32, 32, 4, 2, early=True)
    narrow = {"output_scale": torch.tensor([3 / 127]), "out_dtype": stored}
    if stored != torch.int8:
        narrow["output_scale"] = torch.tensor([3 / 448])
    narrow["output_scale"] = narrow["output_scale"].to(residual.device)
    if product == "wide":
        x, weight, scale = randn(M, K, dtype=torch.float16), randn(C, K, dtype=torch.float16), None
    else:
        x, weight = (randn(n, K, spread=40).clamp(-127, 127).to(stored) for n in (M, C))
        scale = 1e-4 * (1 + randn(C).abs())
    static = narrow["output_scale"]
    if steps == "a step a row":
        narrow = {"per_token": True, "out_dtype": stored}
    for impl, tiles in (("triton", config), ("reference", None)):
        if scale is None:
            stream = ops.linear(x, weight, bias, residual=residual, impl=impl)
        else:
            stream = ops.quantized_linear(x, weight, scale, bias, residual=residual, impl=impl)
        found = ops.linear_add_layer_norm(
            x, weight, bias, residual=residual, scale=scale, **narrow, config=tiles, impl=impl
        )
        # sums of wide operands begin with the bias: a few results round the other way
        torch.testing.assert_close(found.stream, stream, rtol=2**-10, atol=2e-3)
        stream = found.stream
        wanted_steps = None
        if steps == "one step":
            wanted = ops.layer_norm(stream, output_scale=static, out_dtype=stored, impl=impl)
            assert found.row_scale is None
        else:
            wanted, wanted_steps = ops.layer_norm_per_token(stream, dtype=stored, impl=impl)
            torch.testing.assert_close(found.row_scale, wanted_steps, rtol=1e-6, atol=0)
        assert within_one_step(found.normed, wanted)
        assert (found.normed.float() != wanted.float()).float().mean() < 1e-3


def test_a_row_that_overflowed_says_so_where_it_can(randn):
    x, weight = randn(20, 32, dtype=torch.float16), randn(32, 32, dtype=torch.float16)
    residual = randn(20, 32, dtype=torch.float16)
    residual[3, 5] = float("nan")
    config = LinearNormConfig(16, 32, 32, 4, 2)
    call = {"residual": residual, "config": config, "impl": "triton"}
    wide = ops.linear_add_layer_norm(x, weight, **call)
    lost = torch.arange(20) == 3
    assert torch.equal(wide.normed.isnan().all(1).cpu(), lost)
    assert torch.equal(wide.normed.isnan().any(1).cpu(), lost)
    tokens = ops.linear_add_layer_norm(x, weight, **call, per_token=True)
    assert torch.equal(tokens.row_scale.isnan().cpu(), lost)


def test_no_rows():
    empty = torch.empty(0, 3, 32, dtype=torch.float16)
    weight = torch.zeros(32, 32, dtype=torch.float16)
    found = ops.linear_add_layer_norm(empty, weight, residual=empty, per_token=True, impl="triton")
    assert [tuple(t.shape) for t in found] == [(0, 3, 32), (0, 3, 32), (0, 3)]


HALF = torch.float16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bias": torch.zeros(31)}, r"bias must be \[32\], got \(31,\)"),
        ({"residual": torch.zeros(5, 31).half()}, r"residual must be torch.float16 \(5, 32\)"),
        ({"out": torch.zeros(5, 32)}, "out must be torch.float16"),
        ({"out": torch.zeros(32, 5).half().t()}, "out must be contiguous"),
        ({"scale": torch.ones(32)}, "x with scale must be torch.int8 or torch.float8_e4m3fn"),
        ({"output_scale": torch.ones(2)}, r"output_scale must be"),
        ({"per_token": True, "output_scale": torch.ones(1)}, "exclude each other"),
        ({"per_token": True, "out_dtype": HALF}, "out_dtype with per_token must be torch.int8"),
        ({"out_dtype": torch.int8}, "needs output_scale"),
        ({"out_dtype": torch.float32}, "out_dtype must be None or torch.float16"),
        ({"config": 3}, "config must be a LinearNormConfig, got int"),
    ],
    ids=["bias", "residual", "dtype", "strides", "scale", "steps", "both", "format", "alone",
         "wide", "config"],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(change, words):
    x, weight = torch.zeros(5, 32, dtype=HALF), torch.zeros(32, 32, dtype=HALF)
    with pytest.raises(ValueError, match=words):
        ops.linear_add_layer_norm(x, weight, **{"residual": torch.zeros_like(x)} | change)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LinearNormConfig(64, 96, 64, 8, 3), "width must be a power of two"),
        (LinearNormConfig(64, 64, 64, 8, 3), "in 1 to 4 parts, got 64"),
        (LinearNormConfig(64, 128, 64, 8, 1), "num_stages must be at least 2, got 1"),
        (LinearNormConfig(64, 128, 64, 2, 3), r"num_warps must be one of \(4, 8, 16\), got 2"),
        (LinearNormConfig(128, 128, 64, 4, 2), "384 sums a thread of 4 warps"),
        (LinearNormConfig(64, 128, 64, 8, 5), "284 KiB of operands exceed the 227 KiB"),
    ],
    ids=["width", "parts", "stages", "warps", "registers", "memory"],
)
def test_tiles_that_no_program_holds_are_named(config, reason):
    found = linear_norm_blocker(384, 384, 2, (9, 0), config)
    assert found is not None
    assert re.search(reason, found)
    x = torch.zeros(2, 384, dtype=HALF)
    with pytest.raises(RuntimeError, match="cannot run here"):
        ops.linear_add_layer_norm(
            x, torch.zeros(384, 384, dtype=HALF), residual=x, config=config, impl="triton"
        )


def test_default_tiles_by_capability():
    assert part_width(1536) is None
    assert "1536 channels are not one to 4" in linear_norm_blocker(1536, 64, 2, (9, 0))
    assert default_linear_norm_config(6272, 1024, 64, 2, (8, 6)).block_m == 16
    assert "8.0" in linear_norm_blocker(96, 64, 2, (7, 5))
    for C in (96, 128, 192, 256, 384, 512):
        for capability in ((8, 0), (8, 6), (8, 9), (9, 0)):
            config = default_linear_norm_config(6272, C, C, 2, capability)
            assert config is not None
            assert config.tma == (capability == (9, 0))
    assert default_linear_norm_config(49, 384, 384, 2, (9, 0)).block_m == 16
