"""Launcher of the MLP in clusters; what it needs is in config.py."""

from __future__ import annotations

import torch

from fastswin._triton.cluster import launch_clusters
from fastswin._triton.device import HOPPER
from fastswin._triton.tensor_copy import describe
from fastswin._triton.tiles import cdiv
from fastswin.ops.cluster_mlp.config import TILE_COLUMNS, TILE_ROWS, ClusterMlpConfig


def cluster_mlp_fwd(
    x: torch.Tensor,
    tiles: torch.Tensor,
    fc1_sums: torch.Tensor | None,
    fc1_bias: torch.Tensor,
    fc2_bias: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    config: ClusterMlpConfig,
    pdl: bool = False,
    stats_out: torch.Tensor | None = None,
    post_norm: tuple[torch.Tensor, torch.Tensor] | None = None,
    offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """The MLP half of ``x [M, C]`` to ``out``, contiguous and aligned; see ``fastswin.ops.mlp``.

    Args:
        x, out: rows; ``out`` may be ``x``.
        tiles: of packing.py, for as many programs as ``config`` says.
        fc1_sums: of V1's LayerNorm in front, None with ``post_norm``.
        fc1_bias, fc2_bias: fp32.
        eps: LayerNorm epsilon.
        config: legal tiles.
        pdl: see _triton/pdl.py.
        stats_out: ``[2, C / 128, M]`` of what is stored.
        post_norm: weight and bias of V2's LayerNorm, fp32.
        offset: V1's that is added to each row of x first, in x's type; ``fc2_bias`` holds it too,
            for the residual.
    """
    from fastswin._triton.pdl import pdl_options
    from fastswin.ops.cluster_mlp.kernel import _cluster_mlp_kernel

    M, C = x.shape
    if out.numel() == 0:
        return out
    tail = config.tail_bytes(C, offset is not None)
    arguments = (
        out, x, describe(tiles, TILE_ROWS, TILE_COLUMNS),
        *(out if t is None else t for t in (fc1_sums, fc1_bias, fc2_bias, stats_out)),
        *(post_norm or (out, out)), out if offset is None else offset, M, eps,
    )  # fmt: skip
    constants = {
        "C": C, "P": config.programs, "BLOCK_M": config.block_m,
        "SLOTS": config.slots(C, offset is not None),
        "OFFSET": offset is not None, "WRITE_STATS": stats_out is not None,
        "POST_NORM": post_norm is not None, "TAIL": tail,
        "num_warps": config.warps, **pdl_options(pdl, HOPPER),
    }  # fmt: skip
    clusters = cdiv(M, config.block_m)
    launch_clusters(_cluster_mlp_kernel, clusters, config.programs, tail, *arguments, **constants)
    return out
