"""Launcher of the product in clusters; what it needs is in config.py."""

from __future__ import annotations

import torch

from fastswin._triton.cluster import launch_clusters
from fastswin._triton.device import HOPPER
from fastswin._triton.tensor_copy import describe
from fastswin._triton.tiles import cdiv
from fastswin.ops.cluster_linear.config import BLOCK_K, ClusterLinearConfig


def cluster_linear_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    eps: float | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    config: ClusterLinearConfig,
    pdl: bool = False,
    norm_stats: torch.Tensor | None = None,
    weight_sums: torch.Tensor | None = None,
    stats_out: torch.Tensor | None = None,
    post_norm: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """``x [M, K]`` to ``out [M, N]``, contiguous and aligned; see :func:`fastswin.ops.linear`.

    ``out`` may be ``residual``. A norm of x needs its statistics (``norm_stats``); ``post_norm``
    are weight and bias of one of the results, fp32, see :func:`fastswin.ops.linear_post_norm`.
    """
    from fastswin._triton.pdl import pdl_options
    from fastswin.ops.cluster_linear.kernel import _cluster_linear_kernel

    (M, K), N = x.shape, weight.shape[0]
    if out.numel() == 0:
        return out
    normed = post_norm is not None
    tail, size = config.tail_bytes(N, normed), config.programs(N, normed)
    columns = config.columns(N, normed)
    clusters = cdiv(M, config.block_m * config.share_rows) * (N // config.block_n // columns)
    arguments = (
        out, describe(x, config.block_m, BLOCK_K), describe(weight, config.block_n, BLOCK_K),
        *(out if t is None else t for t in (bias, residual, norm_stats, weight_sums, stats_out)),
        *(post_norm or (out, out)),
        M, 0.0 if eps is None else eps,
    )  # fmt: skip
    constants = {
        "N": N, "STEPS": config.steps(K), "SLOTS": config.slots, "EARLY": config.early(K),
        "SPLITS": config.splits, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SHARE_ROWS": config.share_rows, "SHARE_COLUMNS": config.share_columns,
        "COLUMNS": columns, "ACROSS": config.warps_across, "HEAD": config.head_bytes, "TAIL": tail,
        "GELU": activation == "gelu", "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "PARTS": 0 if norm_stats is None else norm_stats.shape[1],
        "WRITE_STATS": stats_out is not None, "POST_NORM": normed,
        "num_warps": config.warps, **pdl_options(pdl, HOPPER),
    }  # fmt: skip
    launch_clusters(
        _cluster_linear_kernel, clusters, size, tail, *arguments,
        buffer_bytes=config.ring_bytes, **constants,
    )  # fmt: skip
    return out
