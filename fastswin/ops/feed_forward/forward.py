"""Forward of the feed-forward layer: which kernels run, and what is left for the backward."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from fastswin._triton.device import device_capability
from fastswin.ops.feed_forward.config import (
    EpilogueConfig,
    FeedForwardConfig,
    FusedConfig,
    default_config,
)
from fastswin.ops.feed_forward.operands import aligned
from fastswin.ops.feed_forward.register import KEEP_NOTHING, KEEP_PRE, Tensors3
from fastswin.ops.hopper_gemm.config import HopperGemmConfig, measured_config


def config_of(
    x: torch.Tensor, fc1_weight: torch.Tensor, fc2_weight: torch.Tensor
) -> FeedForwardConfig:
    """The heuristic's choice for these operands on their GPU."""
    (hidden, C), C_out = fc1_weight.shape, fc2_weight.shape[0]
    config = default_config(C, hidden, C_out, x.dtype, device_capability(x.device))
    rows, place = x.numel() // max(C, 1), (x.dtype, x.device)
    if isinstance(config.forward, EpilogueConfig):
        tiles = measured_config("training", rows, hidden, C, *place)
        config = dataclasses.replace(config, forward=tiles or config.forward)
    if isinstance(config.backward, EpilogueConfig):
        tiles = measured_config("backward", rows, hidden, C_out, *place)
        config = dataclasses.replace(config, backward=tiles or config.backward)
    return config


def feed_forward_fwd(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor,
    keep: int,
    config: FeedForwardConfig | None = None,
) -> Tensors3:
    """``(y, pre, act)``; the latter two are empty where ``keep`` does not ask for them.

    Args:
        x: ``[..., C]``.
        fc1_weight, fc2_weight: ``[hidden, C]`` and ``[C_out, hidden]`` in x's dtype.
        fc1_bias: ``[hidden]`` in any float dtype, or None.
        keep: nothing (the fused form), pre, or both.
        config: forms and tiles; None takes the heuristic's.
    """
    config = config or config_of(x, fc1_weight, fc2_weight)
    shape, nothing = (*x.shape[:-1], fc2_weight.shape[0]), x.new_empty(0)
    rows = aligned(x).view(-1, x.shape[-1])
    fc1_weight, fc2_weight = aligned(fc1_weight), aligned(fc2_weight)
    if keep == KEEP_NOTHING:
        from fastswin.ops.feed_forward.fused_forward import fused_fwd

        assert isinstance(config.forward, FusedConfig)
        y = fused_fwd(rows, fc1_weight, fc1_bias, fc2_weight, config.forward)
        return y.view(shape), nothing, nothing.clone()
    if config.forward is None or isinstance(config.forward, FusedConfig):
        pre = F.linear(rows, fc1_weight, None if fc1_bias is None else fc1_bias.to(x.dtype))
        act = F.gelu(pre)
    elif isinstance(config.forward, HopperGemmConfig):
        from fastswin.ops.hopper_gemm.launch import hopper_epilogue_fwd

        pre, act = hopper_epilogue_fwd(rows, fc1_weight, fc1_bias, config.forward)
    else:
        from fastswin.ops.feed_forward.epilogue import epilogue_fwd

        pre, act = epilogue_fwd(rows, fc1_weight, fc1_bias, config.forward)
    y = F.linear(act, fc2_weight).view(shape)
    hidden_shape = (*x.shape[:-1], fc1_weight.shape[0])
    return y, pre.view(hidden_shape), nothing if keep == KEEP_PRE else act.view(hidden_shape)
