"""Products in clusters: distinct content in every row, column and part of K, and their oracle."""

from __future__ import annotations

import torch

from fastswin import ops
from fastswin.ops.cluster_linear.config import ClusterLinearConfig, ring_slots
from fastswin.ops.linear.stats import write_stats_ref
from fastswin.testing.tolerance import assert_close_to_oracle

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}

#: The epilogue's forms, of which one tile of each cut shows the order.
FORMS = {
    "no bias": {"bias": False},
    "gelu": {"gelu": True},
    "residual": {"residual": True},
    "residual, gelu, no bias": {"residual": True, "gelu": True, "bias": False},
    "norm behind, one part": {"parts": 1},
    "norm behind, gelu": {"parts": 4, "gelu": True},
}

#: Epsilon of a norm behind the product.
EPS = 1e-5


def make_product(
    M: int,
    N: int,
    K: int,
    *,
    parts: int = 0,
    bias: bool = True,
    gelu: bool = False,
    residual: bool = False,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
    offset: float = 1.0,
    seed: int = 0,
) -> dict:
    """Arguments of ``ops.linear``.

    Args:
        parts: of a row whose statistics are given, for a norm behind the product; 0 means none.
        offset: rows lie around so many times their own number modulo 5.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, spread: float = 1.0) -> torch.Tensor:
        return spread * torch.randn(*shape, generator=generator)

    x = draw(M, K, spread=2.0) + offset * (torch.arange(M)[:, None] % 5)
    made = {"x": x.to(dtype), "weight": draw(N, K, spread=K**-0.5).to(dtype)}
    if bias:
        made["bias"] = draw(N)
    if residual:
        made["residual"] = draw(M, N).to(dtype)
    if parts:
        stats = torch.empty(2, parts, M)
        write_stats_ref(made["x"], stats)
        made |= {"norm_stats": stats, "weight_sums": made["weight"].double().sum(1).float()}
    made = {name: t.to(device) for name, t in made.items()}
    if parts:
        made["layer_norm_eps"] = EPS
    return made | ({"activation": "gelu"} if gelu else {})


def plain(made: dict, dtype: torch.dtype) -> dict:
    """The same product for the reference in ``dtype``, which normalises rows itself."""
    kept = {n: v for n, v in made.items() if n not in ("norm_stats", "weight_sums")}
    return {n: v.to(dtype) if isinstance(v, torch.Tensor) else v for n, v in kept.items()}


def check(actual: torch.Tensor, made: dict) -> None:
    """Against eager in the product's dtype and the same formula in fp64."""
    dtype = made["x"].dtype
    eager = ops.linear(**plain(made, dtype), impl="reference")
    oracle = ops.linear(**plain(made, torch.float64), impl="reference")
    assert_close_to_oracle(actual, eager, oracle, dtype)


def check_stats(stats: torch.Tensor, stored: torch.Tensor) -> None:
    """Mean and squared deviations of what is stored, of equal parts of its rows."""
    expected = torch.empty_like(stats, dtype=torch.float64)
    write_stats_ref(stored, expected)
    size = stored.abs().max().item()
    torch.testing.assert_close(stats[0].double(), expected[0], rtol=1e-6, atol=1e-6 * size)
    torch.testing.assert_close(stats[1].double(), expected[1], rtol=1e-5, atol=1e-6 * size)


def check_stream(run, M: int, N: int, K: int, config: ClusterLinearConfig) -> None:
    """As proj and fc2 write it, in place: each part of the statistics is of one tile's columns."""
    made = make_product(M, N, K, residual=True)
    stats = torch.full((2, N // config.block_n, M), float("nan"))
    found = run(made, config, in_place=True, stats_out=stats)
    check(found, made)
    check_stats(stats, found)


def make_post_norm(M: int, N: int, K: int, device: torch.device | str = "cpu", **more) -> dict:
    """Arguments of ``ops.linear_post_norm``; rows and tiles of columns have means of their own."""
    made = make_product(M, N, K, residual=True, **more)
    generator = torch.Generator().manual_seed(99)
    made["bias"] = 3 + 2 * torch.arange(N) / N + torch.randn(N, generator=generator)
    made["norm_weight"] = 1 + 0.3 * torch.randn(N, generator=generator)
    made["norm_bias"] = torch.randn(N, generator=generator)
    return {name: t.to(device) for name, t in made.items()} | {"eps": EPS}


def check_post_norm(actual: torch.Tensor, made: dict) -> None:
    """As :func:`check`."""
    dtype = made["x"].dtype
    eager = ops.linear_post_norm(**plain(made, dtype), impl="reference")
    oracle = ops.linear_post_norm(**plain(made, torch.float64), impl="reference")
    assert_close_to_oracle(actual, eager, oracle, dtype)


def with_ring(
    K: int, block_m: int, block_n: int, splits: int, block_k: int = 64, *shares: int
) -> ClusterLinearConfig:
    """A tile whose ring holds all steps, or as many as fit."""
    slots = ring_slots(block_m, block_n, splits, K, block_k=block_k)
    return ClusterLinearConfig(block_m, block_n, splits, slots, block_k, *shares)


def run_on_card(
    made: dict,
    config: ClusterLinearConfig,
    out: torch.Tensor | None = None,
    stats_out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """The product by the kernel itself."""
    return ops.linear(**made, config=config, out=out, stats_out=stats_out, impl="triton", pdl=pdl)


def run_post_norm(
    made: dict,
    out: torch.Tensor,
    pdl: bool = False,
    config: ClusterLinearConfig | None = None,
) -> torch.Tensor:
    """As :func:`run_on_card`; without tiles by measured ones."""
    return ops.linear_post_norm(**made, out=out, impl="triton", pdl=pdl, config=config)


def room_for_stats(
    M: int, N: int, config: ClusterLinearConfig, device: torch.device
) -> torch.Tensor:
    """NaN where statistics go."""
    return torch.full((2, N // config.block_n, M), float("nan"), device=device)
