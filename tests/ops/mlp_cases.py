"""MLP halves: distinct content in every row and channel, and their oracle."""

from __future__ import annotations

import torch

from fastswin import ops
from fastswin.testing.tolerance import assert_close_to_oracle, compare_to_oracle

EPS = 1e-5


def make_mlp(
    M: int,
    C: int,
    *,
    post_norm: bool = False,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
    offset: float = 1.0,
    seed: int = 0,
) -> dict:
    """Arguments of ``ops.mlp``; rows lie around ``offset`` times their own number modulo 5."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, spread: float = 1.0) -> torch.Tensor:
        return spread * torch.randn(*shape, generator=generator)

    x = draw(M, C, spread=2.0) + offset * (torch.arange(M)[:, None] % 5)
    made = {
        "x": x.to(dtype), "fc1_weight": draw(4 * C, C, spread=C**-0.5).to(dtype),
        "fc1_bias": draw(4 * C), "fc2_weight": draw(C, 4 * C, spread=(4 * C) ** -0.5).to(dtype),
        "fc2_bias": draw(C),
    }  # fmt: skip
    if post_norm:
        made |= {"norm_weight": 1 + 0.3 * draw(C), "norm_bias": draw(C)}
    return {name: t.to(device) for name, t in made.items()} | {"eps": EPS}


def expected(made: dict, dtype: torch.dtype) -> torch.Tensor:
    """The reference in ``dtype``."""
    plain = {n: v.to(dtype) if isinstance(v, torch.Tensor) else v for n, v in made.items()}
    return ops.mlp(**plain, impl="reference")


def check(actual: torch.Tensor, made: dict) -> None:
    """Against eager in the MLP's dtype and the same formula in fp64."""
    dtype = made["x"].dtype
    assert_close_to_oracle(actual, expected(made, dtype), expected(made, torch.float64), dtype)


def errors(actual: torch.Tensor, made: dict):
    """Errors and bounds."""
    dtype = made["x"].dtype
    return compare_to_oracle(actual, expected(made, dtype), expected(made, torch.float64), dtype)
