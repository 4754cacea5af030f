"""Launchers of the Hopper product; what they need is in config.py.

x, dy [M, K]   weight [N, K], in the backward [K, N]   bias [N]   pre, act, dpre, out [M, N]

fp32 operands are cut to TF32 by the tensor cores, so they should be TF32 numbers already.
"""

from __future__ import annotations

import torch

from fastswin._triton.device import HOPPER, multiprocessor_count
from fastswin._triton.launch import launch
from fastswin._triton.tensor_copy import describe
from fastswin._triton.tiles import cdiv
from fastswin.ops.feed_forward.bias_sums import bias_partials, sum_bias_partials
from fastswin.ops.hopper_gemm.config import (
    DEFAULT_BACKWARD,
    DEFAULT_CONFIG,
    Form,
    HopperGemmConfig,
    config_blocker,
    schedule,
)


def hopper_linear_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gelu: bool,
    out: torch.Tensor,
    config: HopperGemmConfig = DEFAULT_CONFIG,
    pdl: bool = False,
) -> torch.Tensor:
    """``out = act(x weight' + bias)`` of contiguous, aligned operands."""
    if out.numel():
        _run(x, weight, bias, None, out, None, None, config, gelu=gelu, pdl=pdl)
    return out


def hopper_epilogue_fwd(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    config: HopperGemmConfig = DEFAULT_CONFIG,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(pre, gelu(pre))``, each ``[M, hidden]``; GELU is taken of pre as rounded."""
    pre = x.new_empty(x.shape[0], fc1_weight.shape[0])
    act = torch.empty_like(pre)
    if pre.numel():
        _run(x, fc1_weight, fc1_bias, pre, act, None, None, config, gelu=True)
    return pre, act


def hopper_epilogue_bwd(
    dy: torch.Tensor,
    pre: torch.Tensor,
    fc2_weight: torch.Tensor,
    *,
    need_act: bool,
    need_bias: bool,
    config: HopperGemmConfig = DEFAULT_BACKWARD,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """``(act or None, dpre, db1 in fp32 or None)`` of ``dy [M, C_out]`` and ``pre [M, hidden]``."""
    M, hidden = pre.shape
    dpre = torch.empty_like(pre)
    act = torch.empty_like(pre) if need_act else None
    db1 = pre.new_empty(hidden, dtype=torch.float32) if need_bias else None
    if M == 0:
        return act, dpre, None if db1 is None else db1.zero_()
    partial = bias_partials(cdiv(M, config.block_m), hidden, pre) if need_bias else None
    _run(dy, fc2_weight, None, pre, act, dpre, partial, config, gelu=True)
    if db1 is not None and partial is not None:
        sum_bias_partials(partial, db1)
    return act, dpre, db1


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pre: torch.Tensor | None,
    out: torch.Tensor | None,
    dpre: torch.Tensor | None,
    partial: torch.Tensor | None,
    config: HopperGemmConfig,
    *,
    gelu: bool,
    pdl: bool = False,
) -> None:
    """Launch; ``dpre`` tells the direction."""
    from fastswin._triton.pdl import pdl_options
    from fastswin.ops.hopper_gemm.kernel import _hopper_gemm_kernel

    backward = dpre is not None
    (M, K), N = x.shape, weight.shape[1 if backward else 0]
    result = next(t for t in (out, dpre) if t is not None)
    form: Form = "backward" if backward else "linear" if pre is None else "training"
    blocker = config_blocker(config, form, x.element_size())
    if blocker is not None:
        raise ValueError(f"config does not fit: {blocker}")
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    # without act, dpre's tiles say how results are staged
    chunk = config.chunk(x.element_size())
    # halves of TF32 products have not run on a card
    halve = not backward and x.element_size() == 2 and block_n % (2 * chunk) == 0
    plan = schedule(M, N, K, config, multiprocessor_count(x.device), halve)
    hidden = [None if t is None else describe(t, block_m, chunk) for t in (pre, result, dpre)]
    launch(
        _hopper_gemm_kernel, plan.programs, x if bias is None else bias,
        describe(x, block_m, block_k),
        describe(weight, *((block_k, block_n) if backward else (block_n, block_k))),
        *hidden, partial, N, K, plan.tiles, plan.columns, plan.rounds,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=config.stages,
        GROUPS=config.groups, WARPS=config.warps, REGISTERS=config.registers,
        BUFFERS=config.buffers, BIAS_FIRST=config.bias_first, BACKWARD=backward,
        HAS_BIAS=bias is not None, EVEN_N=N % block_n == 0, GELU=gelu,
        KEEP_PRE=pre is not None and not backward, NEED_ACT=out is not None,
        NEED_SUMS=partial is not None, HALVES=plan.rounds > 0, num_warps=config.warps,
        **pdl_options(pdl, HOPPER),
    )  # fmt: skip
