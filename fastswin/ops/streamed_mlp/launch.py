"""Launcher of the streamed MLP; what it needs is in config.py."""

from __future__ import annotations

import torch

from fastswin._triton.cluster import launch_clusters
from fastswin._triton.device import HOPPER
from fastswin._triton.launch import launch
from fastswin._triton.tensor_copy import describe
from fastswin._triton.tiles import cdiv, next_power_of_2
from fastswin.ops.streamed_mlp.config import REGISTERS, STEP, StreamedMlpConfig
from fastswin.ops.streamed_mlp.weights import StreamedMlp


def streamed_mlp_fwd(
    x: torch.Tensor,
    packed: StreamedMlp,
    eps: float,
    out: torch.Tensor,
    config: StreamedMlpConfig,
    offset: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """The MLP half of ``x [M, C]`` to ``out``, contiguous and aligned; see ``fastswin.ops.mlp``.

    Args:
        x, out: rows; ``out`` may be ``x``.
        packed: weights, for as many programs as ``config`` says.
        eps: LayerNorm epsilon.
        config: legal tiles.
        offset: ``[C]`` that is added to every row of x first.
        pdl: see _triton/pdl.py.
    """
    from fastswin._triton.pdl import pdl_options
    from fastswin.ops.streamed_mlp.kernel import _streamed_mlp_kernel

    M, C = x.shape
    if out.numel() == 0:
        return out
    count = packed.vectors.shape[1]
    hidden = packed.chunks.shape[0] * STEP // (2 * C)
    arguments = (
        packed.vectors, x if offset is None else offset, describe(x, STEP, STEP),
        describe(packed.chunks, STEP, STEP), describe(out, STEP, STEP), eps,
    )  # fmt: skip
    constants = {
        "C": C, "STEPS": config.steps(hidden), "GROUPS": config.groups, "P": config.programs,
        "SLOTS": config.slots(C, hidden, packed.post_norm), "COUNT": count,
        "VALUES": next_power_of_2(count), "TOGETHER": bool(config.together), "ORDER": config.order,
        "POST_NORM": packed.post_norm, "HAS_OFFSET": offset is not None,
        "TAIL": config.tail_bytes(C), "REGISTERS": REGISTERS[config.groups], "num_warps": 4,
        **pdl_options(pdl, HOPPER),
    }  # fmt: skip
    tiles, tail = cdiv(M, config.rows), config.tail_bytes(C)
    if config.programs == 1:
        launch(_streamed_mlp_kernel, tiles, *arguments, **constants)
    else:
        launch_clusters(
            _streamed_mlp_kernel, tiles, config.programs, tail, *arguments, **constants
        )  # fmt: skip
    return out
