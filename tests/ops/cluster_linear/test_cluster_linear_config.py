"""Tiles of products in clusters: what is measured and chosen is able, what is not says why."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastswin import ops
from fastswin.ops.cluster_linear import config as module
from fastswin.ops.cluster_linear.config import (
    AT_ONCE,
    MAX_SHARED_BYTES,
    MEASURED,
    ClusterLinearConfig,
    config_blocker,
    default_cluster_linear_config,
    ring_slots,
    why_no_cluster_linear,
)
from fastswin.ops.linear import api
from fastswin.ops.linear.stats import write_stats_ref
from fastswin.testing.aot import SHARED_MEMORY_LIMIT

TILE = ClusterLinearConfig(64, 64, 1, 4)

ROWS = [
    pytest.param(N, K, *row, id=f"{row[0]} rows, {N} x {K}")
    for (N, K), ranges in MEASURED.items()
    for row in ranges
]

#: Columns and inputs of the published models' products that are whole tiles, by channels.
PUBLISHED = sorted(
    {(N, K) for C in (96, 128, 192, 256, 384, 512, 768, 1024, 1536)
     for N, K in ((3 * C, C), (C, C), (4 * C, C), (C, 4 * C)) if N % 64 == K % 64 == 0}
)  # fmt: skip


@pytest.mark.parametrize(("N", "K", "rows", "block_m", "block_n", "splits"), ROWS)
def test_measured_tiles_are_able(N, K, rows, block_m, block_n, splits):
    config = default_cluster_linear_config(rows, N, K)
    assert (config.block_m, config.block_n, config.splits) == (block_m, block_n, splits)
    assert config_blocker(config, rows, N, K) is None
    assert config.slots == min(config.steps(K), config.slots)


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_measured_ranges_ascend(shape):
    rows = [row[0] for row in MEASURED[shape]]
    assert rows == sorted(set(rows))
    assert rows[0] > 0


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_a_range_ends_with_its_own_rows(shape):
    """One row more takes the next range, or the model's choice."""
    for number, (rows, *tiles) in enumerate(MEASURED[shape]):
        config = default_cluster_linear_config(rows, *shape)
        assert [config.block_m, config.block_n, config.splits] == tiles
        more = default_cluster_linear_config(rows + 1, *shape)
        assert config_blocker(more, rows + 1, *shape) is None
        if number + 1 < len(MEASURED[shape]):
            assert (more.block_m, more.block_n, more.splits) == MEASURED[shape][number + 1][1:]


@settings(deadline=None, max_examples=300)
@given(
    M=st.integers(1, 200_000),
    N=st.integers(1, 96).map(lambda n: 64 * n),
    K=st.integers(2, 96).map(lambda n: 64 * n),
)
def test_choices_are_able(M, N, K):
    """Of every legal shape: 64 rows and columns in one program take any."""
    config = default_cluster_linear_config(M, N, K)
    assert config is not None
    assert config_blocker(config, M, N, K) is None
    assert config.shared_bytes() <= MAX_SHARED_BYTES
    assert config.splits in AT_ONCE


@pytest.mark.parametrize("shape", PUBLISHED, ids=str)
def test_choices_for_the_published_models_fit_the_card(shape):
    """From one window to a batch that fills the card; a barrier's ring and the tail included."""
    for M in (1, 49, 64, 144, 196, 576, 640, 784, 1024, 1568, 3136, 25_088):
        config = default_cluster_linear_config(M, *shape)
        assert config_blocker(config, M, *shape) is None
        assert config.shared_bytes() <= SHARED_MEMORY_LIMIT[90] * 1024
        ring = config.slots * 128 * (config.block_m + config.block_n)
        sums = 4 * config.block_m * config.block_n if config.splits > 1 else 0
        assert config.shared_bytes() >= ring + sums + 8 * config.slots
        assert 2 <= config.slots <= config.steps(shape[1])


@pytest.mark.parametrize(
    ("M", "N", "K"),
    [(49, 96, 384), (49, 32, 384), (49, 0, 384), (49, 64, 96), (49, 64, 64), (49, 64, 0),
     (49, 64, 32), (2**23, 64, 256), (2**21 - 63, 1024, 128)],
    ids=str,
)  # fmt: skip
def test_no_choice_where_nothing_fits(M, N, K):
    assert default_cluster_linear_config(M, N, K) is None


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_a_ring_has_as_many_slots_as_fit_or_as_steps(block_m, block_n, splits):
    for steps in (2, 3, 5, 8, 12, 24, 96):
        K = 64 * splits * steps
        slots = ring_slots(block_m, block_n, splits, K)
        config = ClusterLinearConfig(block_m, block_n, splits, slots)
        assert config.steps(K) == steps
        assert config_blocker(config, 49, block_n, K) is None
        if slots < steps:
            more = ClusterLinearConfig(block_m, block_n, splits, slots + 1)
            assert more.shared_bytes() > MAX_SHARED_BYTES


def test_shared_memory_of_a_program():
    assert MAX_SHARED_BYTES == SHARED_MEMORY_LIMIT[90] * 1024
    alone = ClusterLinearConfig(64, 128, 1, 6)
    assert (alone.tail_bytes(), alone.shared_bytes()) == (0, 6 * 192 * 128 + 256)
    shared = ClusterLinearConfig(64, 128, 4, 6)
    assert shared.tail_bytes() == 256 + 64 * 128 * 4
    assert shared.shared_bytes() == alone.shared_bytes() + shared.tail_bytes()


@pytest.mark.parametrize(
    ("tiles", "shape", "reason"),
    [
        ((64, 64, 1, 4), (49, 64, 256), None),
        ((128, 128, 8, 2), (49, 128, 1024), None),
        ((32, 64, 1, 4), (49, 64, 256), "tiles of 64 or 128 rows and columns are needed"),
        ((64, 256, 1, 4), (49, 256, 256), "tiles of 64 or 128 rows and columns are needed"),
        ((64, 64, 3, 4), (49, 64, 768), "1, 2, 4 or 8 splits and two slots or more"),
        ((64, 64, 16, 4), (49, 64, 4096), "1, 2, 4 or 8 splits and two slots or more"),
        ((64, 64, 1, 1), (49, 64, 256), "1, 2, 4 or 8 splits and two slots or more"),
        ((128, 128, 1, 8), (49, 128, 512), "takes 262400 of 232448 bytes"),
        ((128, 128, 2, 6), (49, 128, 768), "takes 262656 of 232448 bytes"),
        ((64, 64, 1, 4), (49, 96, 256), "96 columns are no multiple of block_n=64"),
        ((64, 128, 1, 4), (49, 192, 256), "192 columns are no multiple of block_n=128"),
        ((64, 64, 1, 4), (49, 0, 256), "0 columns are no multiple of block_n=64"),
        ((64, 64, 1, 4), (49, 64, 288), "288 input channels are no 1 times 4 or more of 64"),
        ((64, 64, 1, 4), (49, 64, 192), "192 input channels are no 1 times 4 or more of 64"),
        ((64, 64, 4, 2), (49, 64, 384), "384 input channels are no 4 times 2 or more of 64"),
        ((64, 64, 2, 4), (49, 64, 384), "384 input channels are no 2 times 4 or more of 64"),
        ((64, 64, 1, 4), (2**23 - 63, 64, 256), "values are addressed in 32 bits"),
        ((64, 64, 1, 4), (2**23 - 64, 64, 256), None),
        ((64, 64, 1, 4), (2**17, 2**14, 256), "values are addressed in 32 bits"),
    ],
    ids=str,
)
def test_what_a_product_needs(tiles, shape, reason):
    found = config_blocker(ClusterLinearConfig(*tiles), *shape)
    assert found is None if reason is None else reason in found


def test_where_it_does_not_run(monkeypatch):
    monkeypatch.setattr(module, "gluon_blocker", lambda: None)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    cpu, cuda, half = torch.device("cpu"), torch.device("cuda"), torch.float16
    assert why_no_cluster_linear(cpu, half) == "clusters of programs need a GPU"
    for dtype in (torch.float32, torch.float64):
        reason = f"products in clusters are half precision, not {dtype}"
        assert why_no_cluster_linear(cuda, dtype) == reason
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        monkeypatch.setattr(module, "device_capability", lambda device, found=capability: found)
        reason = f"the kernel is written for compute capability 9.0, this is {capability}"
        assert why_no_cluster_linear(cuda, half) == reason
    monkeypatch.setattr(module, "device_capability", lambda device: (9, 0))
    assert why_no_cluster_linear(cuda, half) is None
    assert why_no_cluster_linear(cuda, torch.bfloat16) is None
    monkeypatch.setattr(module, "gluon_blocker", lambda: "this Triton lacks Gluon for Hopper: x")
    assert why_no_cluster_linear(cuda, half) == "this Triton lacks Gluon for Hopper: x"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_no_cluster_linear(cuda, half) == "clusters of programs need a GPU"


def given_product(N=128, K=256, dtype=torch.float16, **more):
    made = {"x": torch.randn(3, 5, K).to(dtype), "weight": torch.randn(N, K).to(dtype) / 16}
    return made | {"config": TILE} | more


def misaligned(*shape):
    return torch.zeros(torch.Size(shape).numel() + 1).half()[1:].view(shape)


def refused(message, **given):
    with pytest.raises(RuntimeError, match=message):
        ops.linear(**given, impl="triton")


REFUSED = {
    "fp32": ({"dtype": torch.float32}, "float32 products are faster"),
    "tf32": (
        {"dtype": torch.float32, "input_precision": "tf32"}, "half precision, not torch.float32",
    ),
    "columns": ({"N": 96}, "96 columns are no multiple of block_n=64"),
    "inputs": ({"K": 192}, "192 input channels are no 1 times 4 or more of 64"),
    "splits": (
        {"config": ClusterLinearConfig(64, 64, 2, 4)}, "256 input channels are no 2 times 4",
    ),
    "tile": ({"config": ClusterLinearConfig(16, 64, 1, 4)}, "tiles of 64 or 128 rows"),
    "norm": ({"layer_norm_eps": 1e-5}, r"rows whose statistics are given \(norm_stats\)"),
    "x lies off": ({"x": misaligned(3, 5, 256)}, "multiples of 16 bytes"),
    "weight lies off": ({"weight": misaligned(128, 256)}, "multiples of 16 bytes"),
    "out lies off": ({"out": misaligned(3, 5, 128)}, "multiples of 16 bytes"),
    "out": ({"out": torch.zeros(5, 3, 128).half().transpose(0, 1)}, "out is not contiguous"),
    "weight": ({"weight": torch.zeros(128, 256)}, "weight is torch.float32, x is torch.float16"),
    "gradient": ({"bias": torch.zeros(128, requires_grad=True)}, "a gradient is needed"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), REFUSED.values(), ids=REFUSED)
def test_a_card_would_refuse_by_name(changed, message, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # tensors on a CPU are no reason
    why = "why_no_cluster_linear"
    found = getattr(api, why)
    monkeypatch.setattr(
        api, why, lambda device, dtype: found(device, dtype) if dtype == torch.float32 else None
    )
    refused(message, **given_product(**changed))
    assert ops.linear(**given_product()).isfinite().all()  # "auto" goes on


@pytest.mark.parametrize(
    ("interpret", "message"),
    [("1", "clusters of programs need a GPU"), ("0", "on the CPU and TRITON_INTERPRET is off")],
)
def test_an_explicit_kernel_says_why_it_cannot_run_on_a_cpu(interpret, message, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    refused(message, **given_product())


SUMS = torch.zeros(128)

UNFIT = {
    "stats alone": ({"norm_stats": torch.zeros(2, 4, 15)}, "norm_stats and weight_sums together"),
    "sums alone": ({"weight_sums": SUMS}, "norm_stats and weight_sums together"),
    "no norm": (
        {"norm_stats": torch.zeros(2, 4, 15), "weight_sums": SUMS},
        "norm_stats needs layer_norm_eps",
    ),
    "parts": (
        {"norm_stats": torch.zeros(2, 3, 15), "weight_sums": SUMS, "layer_norm_eps": 1e-5},
        "equal parts of 256 columns",
    ),
    "parts out": ({"stats_out": torch.zeros(2, 1, 15)}, r"contiguous \[2, parts, 15\]"),
    "rows out": ({"stats_out": torch.zeros(2, 2, 14)}, r"contiguous \[2, parts, 15\]"),
    "dtype out": ({"stats_out": torch.zeros(2, 2, 15).half()}, "stats_out must be float32"),
    "ragged out": (
        {"N": 96, "stats_out": torch.zeros(2, 1, 15)}, "block_n=64 to divide 96 columns",
    ),
    "residual": (
        {"residual": torch.zeros(3, 5, 128), "layer_norm_eps": 1e-5}, "exclude each other",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), UNFIT.values(), ids=UNFIT)
def test_arguments_that_do_not_fit_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        ops.linear(**given_product(**changed))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["plain", "residual", "norm"])
def test_auto_is_the_reference_on_a_cpu(form, dtype):
    """Statistics come along; a norm is taken of the rows themselves."""
    made = given_product(dtype=dtype, bias=torch.randn(128))
    if form == "residual":
        made["residual"] = torch.randn(3, 5, 128).to(dtype)
    reference = {n: v for n, v in made.items() if n != "config"}
    if form == "norm":
        reference["layer_norm_eps"] = made["layer_norm_eps"] = 1e-5
        made["norm_stats"] = torch.empty(2, 4, 15)
        write_stats_ref(made["x"], made["norm_stats"])
        made["weight_sums"] = made["weight"].float().sum(1)
    expected = ops.linear(**reference, impl="reference")
    stats = torch.full((2, 2, 15), float("nan"))
    out = torch.full_like(expected, float("nan"))
    assert ops.linear(**made, out=out, stats_out=stats) is out
    assert torch.equal(out, expected)
    written = torch.empty_like(stats)
    write_stats_ref(expected, written)
    assert torch.equal(stats, written)
