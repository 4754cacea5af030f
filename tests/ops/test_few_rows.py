"""The forms of few rows against the fp64 oracle: one-shot, merging, head; and PDL."""

from __future__ import annotations

import pytest
import torch

from fastswin import ops
from fastswin._triton.pdl import pdl_options
from fastswin.ops.linear.config import GemmConfig, OneShotConfig, default_one_shot_config
from fastswin.ops.linear.stats import write_stats_ref
from fastswin.testing.tolerance import assert_close_to_oracle

DTYPES = [torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])

#: Operators whose second run was compared: the interpreter runs programs one after another, so one
#: problem of each shows whether a run leaves anything behind.
_repeated: set[str] = set()

#: (rows, outputs, inputs) of a stage each, with ragged edges: rows and columns of no tile.
SHAPES = {
    "stage 1": ((70, 96, 96), OneShotConfig(64, 64, 4)),
    "one part of K": ((17, 40, 128), OneShotConfig(16, 32, 4)),
    "stage 3": ((49, 36, 384), OneShotConfig(32, 32, 8)),
    "stage 4": ((7, 20, 768), OneShotConfig(16, 16, 16)),
}


def check(function, made: dict, dtype: torch.dtype, **kernel: object) -> None:
    """Kernel (with its options), eager in ``dtype``, oracle in fp64; inputs stay as they are."""
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in made.items()}
    same = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in made.items()}
    before = {k: v.clone() for k, v in made.items() if isinstance(v, torch.Tensor)}
    first = function(**made, **kernel, impl="triton")
    assert all(torch.equal(made[k], v) for k, v in before.items())
    repeats = 2 if torch.cuda.is_available() else int(function.__name__ not in _repeated)
    _repeated.add(function.__name__)
    for _ in range(repeats):
        assert torch.equal(first, function(**made, **kernel, impl="triton"))
    oracle, eager = function(**wide, impl="reference"), function(**same, impl="reference")
    assert_close_to_oracle(first, eager, oracle, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("extras", ["norm-offset-gelu", "residual"])
def test_one_shot(name, extras, dtype, randn):
    (M, N, K), config = SHAPES[name]
    made = {
        "x": randn(M, K, dtype=dtype, spread=2.0) + 1,
        "weight": randn(N, K, dtype=dtype, spread=K**-0.5),
        "bias": randn(N),
    }
    if extras == "residual":
        made["residual"] = randn(M, N, dtype=dtype)
    else:
        made |= {"layer_norm_eps": 1e-5, "offset": randn(K), "activation": "gelu"}
    check(ops.linear, made, dtype, config=config, pdl=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", [1, 3], ids=["one part", "three parts"])
def test_norm_behind_the_product_by_the_statistics_of_the_one_before(parts, dtype, randn):
    """proj onto a stream whose rows have means far larger than their deviations, then fc1."""
    M, K, N = 37, 96, 72
    stream = randn(M, K, dtype=dtype) + 8
    stream *= torch.logspace(-2, 2, M).to(stream)[:, None]
    attended, proj = randn(M, 64, dtype=dtype), randn(K, 64, dtype=dtype, spread=0.02)
    config = OneShotConfig(16, K // parts, 4) if parts == 3 else OneShotConfig(32, 32, 4)
    if parts == 1:
        stream, proj, K = stream[:, :32].contiguous(), proj[:32].contiguous(), 32
    stats = torch.full((2, parts, M), float("nan"), device=stream.device)
    plain = ops.linear(attended, proj, residual=stream, config=config, impl="triton")
    x = ops.linear(
        attended, proj, residual=stream, stats_out=stats, config=config, impl="triton", pdl=True
    )
    assert torch.equal(x, plain)
    expected = torch.empty_like(stats)
    write_stats_ref(x, expected)
    torch.testing.assert_close(stats[0], expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(stats[1], expected[1], rtol=1e-5, atol=0)
    weight = randn(N, K, dtype=dtype, spread=K**-0.5)
    made = {
        "x": x, "weight": weight, "bias": randn(N), "layer_norm_eps": 1e-5, "activation": "gelu",
    }  # fmt: skip
    behind = {"norm_stats": stats, "weight_sums": weight.double().sum(1).float()}
    oracle = ops.linear(
        x.double(), weight.double(), made["bias"].double(), layer_norm_eps=1e-5,
        activation="gelu", impl="reference",
    )  # fmt: skip
    eager = ops.linear(**made | {"bias": made["bias"].to(dtype)}, impl="reference")
    tiles = OneShotConfig(16, 32, 4)
    first = ops.linear(**made, **behind, config=tiles, impl="triton", pdl=True)
    assert torch.equal(first, ops.linear(**made, **behind, config=tiles, impl="triton"))
    assert_close_to_oracle(first, eager, oracle, dtype)
    written = torch.empty_like(stats)
    ops.linear(attended, proj, residual=stream, stats_out=written, config=config, impl="reference")
    torch.testing.assert_close(written, expected, rtol=1e-3, atol=1e-2)
    assert_close_to_oracle(
        ops.linear(**made, **behind, config=tiles, impl="reference"), eager, oracle, dtype
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_sums": None}, "norm_stats and weight_sums together"),
        ({"layer_norm_eps": None}, "norm_stats needs layer_norm_eps"),
        ({"offset": torch.zeros(32)}, "excludes offset"),
        (
            {"config": None},
            "norm_stats needs a OneShotConfig or a ClusterLinearConfig, got NoneType",
        ),
        ({"norm_stats": torch.zeros(2, 3, 5)}, "equal parts of 32 columns, got \\(2, 3, 5\\)"),
        ({"norm_stats": torch.zeros(2, 2, 5).double()}, "norm_stats must be float32"),
        ({"weight_sums": torch.zeros(32)}, r"weight_sums must be contiguous float32 \[48\]"),
        ({"weight_sums": torch.zeros(48, 2)[:, 0]}, "weight_sums must be contiguous"),
        ({"weight_sums": torch.zeros(48).half()}, "weight_sums must be .*, got torch.float16"),
        ({"stats_out": torch.zeros(2, 2, 5)}, "block_n=32 to divide 48"),
    ],
    ids=[
        "sums", "eps", "offset", "config", "parts", "dtype", "length", "strided", "half", "ragged",
    ],
)  # fmt: skip
def test_statistics_that_do_not_fit_are_refused(change, words):
    made = {
        "layer_norm_eps": 1e-5, "norm_stats": torch.zeros(2, 2, 5), "weight_sums": torch.zeros(48),
        "config": OneShotConfig(16, 32, 4),
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=words):
        ops.linear(torch.zeros(5, 32).half(), torch.zeros(48, 32).half(), **made)


def test_onto_the_residual_in_place(randn):
    """Several programs share rows of x and of the stream; each writes only its own tile."""
    h, weight = (
        randn(40, 384, dtype=torch.float16),
        randn(96, 384, dtype=torch.float16, spread=0.05),
    )
    for config in (GemmConfig(16, 32, 32, 4, 2), OneShotConfig(16, 32, 8)):
        stream = randn(40, 96, dtype=torch.float16)
        expected = ops.linear(h, weight, residual=stream, config=config, impl="triton")
        written = ops.linear(h, weight, residual=stream, out=stream, config=config, impl="triton")
        assert written is stream
        assert torch.equal(stream, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "normalised"),
    [((2, 6, 10, 32), True), ((1, 5, 7, 48), True), ((1, 3, 4, 48), False)],
    ids=["even", "odd sides", "without norm"],
)
def test_merge_neighbours(shape, normalised, dtype, randn):
    C = shape[3]
    made = {
        "x": randn(*shape, dtype=dtype, spread=2.0),
        "weight": randn(2 * C, 4 * C, dtype=dtype, spread=(4 * C) ** -0.5),
        "bias": randn(2 * C),
        "layer_norm_eps": 1e-5 if normalised else None,
        "offset": randn(C),
    }
    check(ops.merge_neighbours, made, dtype, pdl=True)


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES], ids=str)
@pytest.mark.parametrize(
    ("shape", "classes"), [((2, 3, 5, 96), 20), ((1, 7, 7, 768), 9)], ids=["b2", "stage 4"]
)
def test_norm_pool_head(shape, classes, dtype, randn):
    C = shape[3]
    made = {
        "x": randn(*shape, dtype=dtype, spread=2.0),
        "weight": 1 + 0.3 * randn(C),
        "bias": randn(C),
        "head_weight": randn(classes, C, dtype=dtype, spread=C**-0.5),
        "head_bias": randn(classes),
        "offset": randn(C),
    }
    check(ops.norm_pool_head, made, dtype, pdl=True)


@pytest.mark.parametrize("function", [ops.merge_neighbours, ops.norm_pool_head])
def test_empty_batch(function, randn):
    x, vector = randn(0, 4, 4, 32, dtype=torch.float16), randn(32)
    if function is ops.merge_neighbours:
        out = function(x, randn(64, 128, dtype=torch.float16), impl="triton")
        assert out.shape == (0, 2, 2, 64)
    else:
        out = function(x, vector, vector, randn(10, 32, dtype=torch.float16), impl="triton")
        assert out.shape == (0, 10)


def test_a_config_of_another_kernel_or_width_is_refused(randn):
    x, weight = randn(4, 80, dtype=torch.float16), randn(8, 80, dtype=torch.float16)
    wide = randn(4, 2048, dtype=torch.float16)
    config = OneShotConfig(16, 16, 4)
    with pytest.raises(RuntimeError, match="2048 input channels exceed 1536"):
        ops.linear(wide, wide, config=config, impl="triton")
    with pytest.raises(RuntimeError, match="40 input channels are not one or two powers of two"):
        ops.linear(x[:, :40], weight[:, :40], config=config, impl="triton")
    with pytest.raises(ValueError, match="config must be a LayerNormLinearConfig or OneShotConfig"):
        ops.linear(
            x, weight, layer_norm_eps=1e-5, config=GemmConfig(16, 16, 32, 4, 2), impl="triton"
        )


@pytest.mark.parametrize(("M", "C"), [(3136, 96), (784, 256), (196, 384), (49, 1024), (1, 32)])
def test_heuristics_are_legal_and_fill_the_card(M, C):
    for N, K in ((3 * C, C), (C, C), (4 * C, C)):
        config = default_one_shot_config(M, N, K, 132)
        assert ops.linear(
            torch.zeros(1, K), torch.zeros(N, K), config=config, impl="reference"
        ).shape == (1, N)
        assert 32 * config.num_warps * 255 >= config.block_m * K // 4  # x in half the registers


def test_programmatic_launch_needs_hopper(monkeypatch):
    monkeypatch.setattr("fastswin._triton.pdl.interpreting", lambda: True)
    assert pdl_options(True, (9, 0)) == {"PDL": False}  # the interpreter has no such launch
    monkeypatch.setattr("fastswin._triton.pdl.interpreting", lambda: False)
    assert pdl_options(True, (8, 9)) == {"PDL": False}
    assert pdl_options(False, (9, 0)) == {"PDL": False}
    assert pdl_options(True, (9, 0)) == {"PDL": True, "launch_pdl": True}
