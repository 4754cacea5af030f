"""Launcher of the streamed MLP; what it needs is in config.py.

x, out [M, C]   fc1 [H, C]   fc2 [C, H]   biases and norms in fp32
"""

from __future__ import annotations

import torch

from fastswin._triton.cluster import launch_clusters
from fastswin._triton.device import HOPPER
from fastswin._triton.launch import launch
from fastswin._triton.tensor_copy import describe
from fastswin._triton.tiles import cdiv
from fastswin.ops.streamed_mlp.config import REGISTERS, STEP, StreamedMlpConfig, config_blocker


def streamed_mlp_fwd(
    x: torch.Tensor,
    fc1: tuple[torch.Tensor, torch.Tensor],
    fc2: tuple[torch.Tensor, torch.Tensor],
    norm: tuple[torch.Tensor, torch.Tensor] | None,
    offset: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    config: StreamedMlpConfig,
    pdl: bool = False,
) -> torch.Tensor:
    """The MLP half of a block on contiguous, aligned rows ``[M, C]``; ``out`` may be ``x``.

    Args:
        x, out: ``[M, C]``.
        fc1, fc2: weight and bias of each layer.
        norm: V2's LayerNorm behind, None for V1's in front.
        offset: ``[C]`` added to every row first, or None.
        eps: LayerNorm epsilon.
        config: tiles.
        pdl: programmatic dependent launch.

    Raises:
        ValueError: the kernel does not take these tiles or channels.
    """
    from fastswin._triton.pdl import pdl_options
    from fastswin.ops.streamed_mlp.kernel import _streamed_mlp_kernel

    (M, C), H = x.shape, fc1[0].shape[0]
    if blocker := config_blocker(config, M, C, H):
        raise ValueError(f"config does not fit: {blocker}")
    arguments = (
        fc1[1], fc2[1], *(norm or (x, x)), x if offset is None else offset,
        *(describe(t, STEP, STEP) for t in (x, fc1[0], fc2[0], out)), eps,
    )  # fmt: skip
    tiles, tail, behind = cdiv(M, config.rows), config.tail_bytes(C), norm is not None
    constants = {
        "C": C, "STEPS": config.steps(H), "GROUPS": config.groups, "P": config.programs,
        "SLOTS": config.slots(C, H, behind), "HELD": config.held(C), "TOGETHER": config.together(C),
        "POST_NORM": behind, "HAS_OFFSET": offset is not None, "TAIL": tail,
        "REGISTERS": REGISTERS[config.groups], "num_warps": 4, **pdl_options(pdl, HOPPER),
    }  # fmt: skip
    if config.programs == 1:
        launch(_streamed_mlp_kernel, tiles, *arguments, **constants)
    else:
        launch_clusters(
            _streamed_mlp_kernel, tiles, config.programs, tail, *arguments, **constants
        )  # fmt: skip
    return out
