"""Launchers of the resident kernels; what they need is in config.py.

x, out [M, C]   weight [N, C]   fc1 [H, C]   fc2 [C, H]   biases and norms in fp32
"""

from __future__ import annotations

import torch

from fastswin._triton.device import HOPPER, multiprocessor_count
from fastswin._triton.launch import launch
from fastswin._triton.tensor_copy import describe
from fastswin._triton.tiles import cdiv
from fastswin.ops.hopper_resident.config import (
    REGISTERS,
    ROWS,
    ResidentMlpConfig,
    ResidentProductConfig,
    mlp_blocker,
    product_blocker,
)

#: Channels of the first part of a row.
PART = 64


def resident_product_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    offset: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    config: ResidentProductConfig,
) -> torch.Tensor:
    """``out = norm(x + offset) weight' + bias`` of contiguous, aligned operands ``[M, C]``.

    Raises:
        ValueError: a program cannot hold the weight.
    """
    from fastswin.ops.hopper_resident.kernel import _resident_product_kernel

    (M, C), N = x.shape, weight.shape[0]
    blocker = product_blocker(config, N, C)
    if blocker is not None:
        raise ValueError(f"config does not fit: {blocker}")
    tiles = cdiv(M, ROWS)
    launch(
        _resident_product_kernel, min(tiles, multiprocessor_count(x.device)),
        x if bias is None else bias, x if offset is None else offset,
        describe(x, ROWS, PART), describe(x, ROWS, C - PART),
        describe(weight, config.block_n, PART), describe(weight, config.block_n, C - PART),
        describe(out, ROWS, config.block_n), N, tiles, eps,
        STEPS=cdiv(N, config.block_n), GROUPS=config.groups, REGISTERS=REGISTERS[config.groups],
        BUFFERS=config.buffers, HAS_BIAS=bias is not None, HAS_OFFSET=offset is not None,
        num_warps=4,
    )  # fmt: skip
    return out


def resident_mlp_fwd(
    x: torch.Tensor,
    fc1: tuple[torch.Tensor, torch.Tensor],
    fc2: tuple[torch.Tensor, torch.Tensor],
    norm: tuple[torch.Tensor, torch.Tensor] | None,
    offset: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    config: ResidentMlpConfig,
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
    from fastswin.ops.hopper_resident.kernel import _resident_mlp_kernel

    (M, C), hidden = x.shape, fc1[0].shape[0]
    blocker = mlp_blocker(config, hidden, C)
    if blocker is not None:
        raise ValueError(f"config does not fit: {blocker}")
    tiles, second, block_h = cdiv(M, ROWS), C - PART, config.block_h
    launch(
        _resident_mlp_kernel, min(tiles, multiprocessor_count(x.device)),
        fc1[1], fc2[1], *(norm or (x, x)), x if offset is None else offset,
        describe(x, ROWS, PART), describe(x, ROWS, second),
        describe(fc1[0], block_h, PART), describe(fc1[0], block_h, second),
        describe(fc2[0], PART, block_h), describe(fc2[0], second, block_h),
        describe(out, ROWS, PART), describe(out, ROWS, second), tiles, eps,
        STEPS=hidden // block_h, STAGES=config.stages(hidden, C), GROUPS=config.groups,
        REGISTERS=REGISTERS[config.groups], POST_NORM=norm is not None,
        HAS_OFFSET=offset is not None, num_warps=4,
        **pdl_options(pdl, HOPPER),
    )  # fmt: skip
    return out
