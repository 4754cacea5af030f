"""Statistics of rows between two products: who writes them, and what a LayerNorm behind one reads.

stats [2, T, rows] fp32: mean, and sum of squared deviations from it, of T equal parts of a row
"""

from __future__ import annotations

import torch

from fastswin.ops.cluster_linear.config import ClusterLinearConfig
from fastswin.ops.linear.config import OneShotConfig


def check_stats(
    x: torch.Tensor,
    N: int,
    eps: float | None,
    offset: torch.Tensor | None,
    norm_stats: torch.Tensor | None,
    weight_sums: torch.Tensor | None,
    stats_out: torch.Tensor | None,
    config: object,
) -> None:
    """Raise a ValueError unless statistics of rows fit a product, see :func:`fastswin.ops.linear`.

    Args:
        x: ``[..., K]``, ``N`` columns of the result.
        eps, offset, norm_stats, weight_sums, stats_out, config: the public function's.
    """
    rows, K = x.shape[:-1].numel(), x.shape[-1]
    if (norm_stats is None) != (weight_sums is None):
        raise ValueError("give norm_stats and weight_sums together or not at all")
    if norm_stats is not None and (eps is None or offset is not None):
        raise ValueError("norm_stats needs layer_norm_eps and excludes offset")
    for name, stats, width in (("norm_stats", norm_stats, K), ("stats_out", stats_out, N)):
        if stats is None:
            continue
        if not isinstance(config, OneShotConfig | ClusterLinearConfig):
            raise ValueError(
                f"{name} needs a OneShotConfig or a ClusterLinearConfig, got "
                f"{type(config).__name__}"
            )
        parts = None
        if name == "stats_out":
            if N % config.block_n:
                raise ValueError(f"stats_out needs block_n={config.block_n} to divide {N} columns")
            parts = N // config.block_n
        check_row_stats(name, stats, rows, width, x.dtype, parts)
    if weight_sums is not None:
        wide = torch.promote_types(x.dtype, torch.float32)
        whole = weight_sums.is_contiguous() and weight_sums.dtype == wide
        if tuple(weight_sums.shape) != (N,) or not whole:
            raise ValueError(
                f"weight_sums must be contiguous float32 [{N}], got {weight_sums.dtype} "
                f"{tuple(weight_sums.shape)}"
            )


def check_row_stats(
    name: str,
    stats: torch.Tensor,
    rows: int,
    width: int,
    dtype: torch.dtype,
    parts: int | None = None,
) -> None:
    """Raise a ValueError unless ``stats`` are of so many rows.

    Args:
        name: the argument's.
        stats: to be checked.
        rows, width: of the matrix, in values of ``dtype``.
        parts: how many of a row there must be; None takes any that are equal.
    """
    found = stats.shape[1] if stats.ndim == 3 else 0
    legal = (2, found if parts is None else parts, rows)
    if tuple(stats.shape) != legal or not found or width % found or not stats.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous [2, parts, {rows}] with equal parts of {width} columns, "
            f"got {tuple(stats.shape)}"
        )
    if stats.dtype != torch.promote_types(dtype, torch.float32):
        raise ValueError(f"{name} must be float32, got {stats.dtype}")


def write_stats_ref(y: torch.Tensor, stats: torch.Tensor) -> None:
    """Write the statistics of ``y [..., N]``."""
    parts = y.to(stats.dtype).view(stats.shape[2], stats.shape[1], -1)
    squares, mean = torch.var_mean(parts, 2, correction=0)
    stats[0], stats[1] = mean.T, squares.T * parts.shape[2]
