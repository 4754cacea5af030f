"""``ops.linear`` with tiles of products in clusters: what it refuses, what it does instead."""

from __future__ import annotations

import pytest
import torch

from fastswin import ops
from fastswin.ops.cluster_linear.config import ClusterLinearConfig
from fastswin.ops.linear import api
from fastswin.ops.linear.stats import write_stats_ref

TILE = ClusterLinearConfig(64, 64, 1, 4)


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
    "inputs": ({"K": 288}, "288 input channels are no multiple of 1 times 64"),
    "steps": ({"K": 192}, "a ring for 3 steps has two slots to as many, not 4"),
    "splits": (
        {"config": ClusterLinearConfig(64, 64, 8, 2)},
        "256 input channels are no multiple of 8 times 64",
    ),
    "ring": ({"config": ClusterLinearConfig(64, 64, 2, 1)}, "a ring for 2 steps has two slots"),
    "tile": ({"config": ClusterLinearConfig(8, 64, 1, 4)}, "tiles of 16, 32, 64 or 128 rows"),
    "narrow": ({"config": ClusterLinearConfig(16, 64, 4, 1)}, "adds 8 of 16 rows or more"),
    "width": ({"config": ClusterLinearConfig(64, 64, 1, 4, 32)}, "64, 128 or 256 channels"),
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
