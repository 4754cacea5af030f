"""Split-K product and its joining against the fp64 oracle."""

from __future__ import annotations

import pytest
import torch

from fastswin import ops
from fastswin.ops.split_k.config import (
    MAX_SLICE,
    SplitKConfig,
    default_split_k_config,
    why_no_split_k,
)
from fastswin.testing.steps import steps_apart
from fastswin.testing.tolerance import assert_close_to_oracle

DTYPES = [torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
REPEATS = 2 if torch.cuda.is_available() else 1

#: (rows, outputs, inputs) with ragged edges, and a cut: slices of one part, of two, and one slice.
CASES = {
    "one part": ((19, 40, 128), SplitKConfig(2, 16, 32, 4)),
    "two parts": ((33, 24, 192), SplitKConfig(4, 32, 16, 4)),
    "one slice": ((7, 20, 96), SplitKConfig(1, 16, 16, 4)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_sum_of_the_slices_is_the_product(name, dtype, randn):
    (M, N, K), config = CASES[name]
    x = randn(M, K, dtype=dtype) + 1
    weight = randn(N, K, dtype=dtype, spread=K**-0.5)
    partials = ops.split_k_linear(x, weight, config=config, impl="triton", pdl=True)
    assert partials.shape == (config.splits, M, N)
    for _ in range(REPEATS):
        again = ops.split_k_linear(x, weight, config=config, impl="triton", pdl=True)
        assert torch.equal(partials, again)
    oracle = x.double() @ weight.double().T
    assert_close_to_oracle(partials.sum(0).to(dtype), x @ weight.T, oracle, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [96, 40], ids=["two parts", "padded"])
@pytest.mark.parametrize("norm", ["none", "pre", "post"])
def test_joining(norm, channels, dtype, randn):
    partials = randn(3, 2, 5, channels)
    stream = randn(2, 5, channels, dtype=dtype) + 2
    vectors = {"bias": randn(channels)}
    if norm == "post":
        vectors |= {"norm_weight": randn(channels), "norm_bias": randn(channels)}
    wide = {name: vector.double() for name, vector in vectors.items()}
    half = {name: vector.to(dtype) for name, vector in vectors.items()}

    def run(partials, stream, vectors, impl):
        stream = stream.clone()
        out = ops.add_split_k(partials, stream, **vectors, norm=norm, impl=impl)
        return [stream] if out is None else [stream, out]

    ours = run(partials, stream, vectors, "triton")
    for _ in range(REPEATS):
        again = run(partials, stream, vectors, "triton")
        assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    oracle = run(partials.double(), stream.double(), wide, "reference")
    # what eager computes: the product and the stream rounded to half precision on the way
    product = (partials.sum(0) + vectors["bias"]).to(dtype)
    if norm == "post":
        scale = half["norm_weight"], half["norm_bias"]
        product = torch.nn.functional.layer_norm(product, (channels,), *scale)
    eager = [stream + product]
    if norm == "pre":
        eager.append(torch.nn.functional.layer_norm(eager[0], (channels,)))
    assert len(ours) == len(eager)
    for a, e, o in zip(ours, eager, oracle, strict=True):
        assert_close_to_oracle(a, e, o, dtype)


def test_the_heuristic_cuts_every_swin():
    """Widths of all published models: slices are equal, and no wider than a program holds."""
    for C in (96, 128, 192):
        for stage in range(4):
            channels = C << stage
            config = default_split_k_config(196, channels, 4 * channels, 132)
            assert config is not None
            assert 4 * channels % config.splits == 0
            assert 4 * channels // config.splits <= MAX_SLICE


def test_older_gpus_take_the_reference(monkeypatch):
    """Their tensor cores want operands in registers: 1.3 to 3.5 KB of them would be spilled."""
    monkeypatch.setattr("fastswin.ops.split_k.config.device_capability", lambda device: (8, 9))
    assert "compute capability 9.0" in str(why_no_split_k(torch.device("cuda")))
    assert why_no_split_k(torch.device("cpu")) is None


def test_empty_rows_give_empty_sums():
    weight = torch.zeros(24, 64, dtype=torch.float16)
    x = torch.zeros(0, 64, dtype=torch.float16)
    assert ops.split_k_linear(x, weight).shape == (1, 0, 24)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(3, 32)}, r"x must be \[\.\.\., 64\].*\(3, 32\)"),
        ({"weight": torch.zeros(8, 64).half()}, "weight must be torch.float32"),
        ({"config": SplitKConfig(3, 16, 16, 4)}, "config: splits must divide 64"),
        ({"config": SplitKConfig(4, 8, 16, 4)}, "config: block_m must be a power of two of at le"),
        (
            {"x": torch.zeros(3, 40), "weight": torch.zeros(8, 40)},
            "config: slices of 10 channels",
        ),
        ({"x": torch.zeros(3, 52), "weight": torch.zeros(8, 52), "config": None}, "weight: 52"),
    ],
)
def test_bad_products_are_refused(change, words):
    given = {"x": torch.zeros(3, 64), "weight": torch.zeros(8, 64)}
    given |= {"config": SplitKConfig(4, 16, 16, 4)} | change
    with pytest.raises(ValueError, match=words):
        ops.split_k_linear(**given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm": "layer"}, "norm must be one of none, pre, post, got 'layer'"),
        ({"partials": torch.zeros(2, 3, 9)}, r"partials must be \[splits, \*\(3, 8\)\]"),
        ({"partials": torch.zeros(17, 3, 8)}, "1 to 16 slices, got 17"),
        ({"partials": torch.zeros(2, 3, 8).half()}, "partials must be torch.float32"),
        ({"stream": torch.zeros(8, 3).T}, "contiguous"),
        ({"bias": torch.zeros(7)}, r"bias must be \[8\], got \(7,\)"),
        ({"norm": "pre", "norm_bias": torch.zeros(8)}, 'need norm="post"'),
    ],
)
def test_bad_joins_are_refused_and_nothing_is_written(change, words):
    given = {"partials": torch.ones(2, 3, 8), "stream": torch.zeros(3, 8)} | change
    with pytest.raises(ValueError, match=words):
        ops.add_split_k(**given)
    assert given["stream"].abs().max() == 0


FORMATS = {"int8": torch.int8} | (
    {"fp8": torch.float8_e4m3fn} if torch.cuda.is_available() else {}
)  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_slices_of_8_bits(name, format, randn):
    """int8 sums are exact; joined, normed and rounded as the chain of single operators does."""
    (M, N, K), config = CASES[name]
    dtype = FORMATS[format]
    x = ops.quantize(randn(M, K), torch.full((1,), 0.03, device=randn(1).device), dtype)
    weight, step = ops.quantize_per_token(randn(N, K) * K**-0.5, dtype)
    scale = step * 0.03
    partials = ops.split_k_linear(x, weight, scale=scale, config=config, impl="triton", pdl=True)
    wanted = ops.split_k_linear(x, weight, scale=scale, config=config, impl="reference")
    error = 1e-6 if format == "int8" else 4e-3
    torch.testing.assert_close(partials, wanted, rtol=error, atol=error * wanted.std().item())

    stream, out_step = randn(M, N, dtype=torch.float16), torch.full_like(scale[:1], 0.04)
    streams = [stream.clone() for _ in range(3)]
    found, again, chain = (
        ops.add_split_k(partials, s, norm="pre", impl=impl, output_scale=out_step, out_dtype=dtype)
        for s, impl in zip(streams, ("triton", "triton", "reference"), strict=True)
    )
    assert torch.equal(found.view(torch.uint8), again.view(torch.uint8))
    assert steps_apart(found, chain).max() <= 1
    torch.testing.assert_close(streams[0], streams[2], rtol=1e-3, atol=1e-3)


def test_8_bit_slices_are_refused_by_name(randn):
    x = torch.zeros(4, 64, dtype=torch.int8)
    with pytest.raises(ValueError, match="scale must be given for 8-bit operands"):
        ops.split_k_linear(x, x)
    with pytest.raises(ValueError, match=r"scale must be float32 \[4\]"):
        ops.split_k_linear(x, x, scale=torch.ones(3))
    partials, stream = torch.zeros(1, 4, 16), torch.zeros(4, 16)
    with pytest.raises(ValueError, match='output_scale needs norm="pre"'):
        ops.add_split_k(partials, stream, output_scale=torch.ones(1))
    with pytest.raises(ValueError, match="out_dtype"):
        ops.add_split_k(partials, stream, norm="pre", out_dtype=torch.int8)
