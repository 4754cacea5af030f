"""The kernel's own source, its partitions as threads: results, and that no wait is for ever."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from partitions import Descriptor, Pointer, run_kernel

from fastswin.ops.hopper_gemm.config import HopperGemmConfig, schedule

torch.set_num_threads(1)

TWO = HopperGemmConfig(16, 32, 8, stages=3, groups=2, warps=4, buffers=3)
THREE = HopperGemmConfig(16, 32, 8, stages=3, groups=3, warps=4, buffers=3)
BEHIND = dataclasses.replace(TWO, bias_first=False)

#: M, N, K and programs.
SHAPES = {
    "one tile, fewer steps than stages": (10, 32, 16, 1),
    "fewer tiles than programs": (20, 64, 24, 132),
    "odd tiles": (50, 72, 40, 2),
    "edges on every side": (37, 88, 44, 3),
    "many tiles, one program": (70, 104, 20, 1),
    "one step": (40, 96, 8, 2),
    "halves of one tile": (48, 96, 24, 4),
    "halves for all but one program": (70, 96, 20, 4),
    "half a tile beyond the edge": (48, 72, 40, 4),
}

CASES = {
    f"{name}, {groups} groups": (config, shape)
    for name, shape in SHAPES.items()
    for groups, config in (("two", TWO), ("three", THREE))
}
#: With the bias added behind the products; the backward has none.
BIAS_BEHIND = {f"{name}, bias behind": (BEHIND, shape) for name, shape in SHAPES.items()}


def operands(M, N, K, backward):
    draw = torch.Generator().manual_seed(M * N + K)
    x = torch.randn(M, K, generator=draw)
    w = torch.randn(K, N, generator=draw) if backward else torch.randn(N, K, generator=draw)
    return x, w, torch.randn(N, generator=draw), torch.randn(M, N, generator=draw)


def launch(config, shape, *, chunk=16, backward=False, keep_pre=False, gelu=True):
    M, N, K, multiprocessors = shape
    x, w, bias, pre = operands(M, N, K, backward)
    if not backward:
        pre = torch.full((M, N), float("nan"))
    out, dpre = torch.full((M, N), float("nan")), torch.full((M, N), float("nan"))
    plan = schedule(M, N, K, config, multiprocessors, halve=not backward)
    partial = torch.full((-(-M // config.block_m), N), float("nan"))
    w_block = [config.block_k, config.block_n] if backward else [config.block_n, config.block_k]
    hidden = [Descriptor(t, [config.block_m, chunk]) for t in (pre, out, dpre)]
    run_kernel(
        plan.programs, Pointer(bias),
        Descriptor(x, [config.block_m, config.block_k]), Descriptor(w, w_block), *hidden,
        Pointer(partial.view(-1)), N, K, plan.tiles, plan.columns, plan.rounds,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        STAGES=config.stages, GROUPS=config.groups, WARPS=config.warps,
        REGISTERS=config.registers, BUFFERS=config.buffers, BIAS_FIRST=config.bias_first,
        BACKWARD=backward, HAS_BIAS=not backward, EVEN_N=N % config.block_n == 0, GELU=gelu,
        KEEP_PRE=keep_pre, NEED_ACT=True, NEED_SUMS=backward, HALVES=plan.rounds > 0,
    )  # fmt: skip
    return (x, w, bias, pre), (pre, out, dpre, partial)


@pytest.mark.parametrize(
    ("config", "shape"), (CASES | BIAS_BEHIND).values(), ids=CASES | BIAS_BEHIND
)
def test_forward(config, shape):
    (x, w, bias, _), (_, out, _, _) = launch(config, shape)
    torch.testing.assert_close(out, torch.nn.functional.gelu(x @ w.T + bias))


@pytest.mark.parametrize("buffers", [1, 2, 3], ids="{} buffers".format)
@pytest.mark.parametrize("groups", [2, 3], ids="{} groups".format)
def test_training_forward(groups, buffers):
    config = HopperGemmConfig(16, 32, 8, 3, groups, 4, buffers)
    (x, w, bias, _), (pre, out, _, _) = launch(config, SHAPES["odd tiles"], keep_pre=True)
    torch.testing.assert_close(pre, x @ w.T + bias)
    torch.testing.assert_close(out, torch.nn.functional.gelu(pre))


@pytest.mark.parametrize(("config", "shape"), CASES.values(), ids=CASES)
def test_backward(config, shape):
    (dy, w, _, pre), (_, act, dpre, partial) = launch(config, shape, backward=True)
    pre = pre.requires_grad_()
    torch.nn.functional.gelu(pre).backward(dy @ w)
    torch.testing.assert_close(act, torch.nn.functional.gelu(pre).detach())
    torch.testing.assert_close(dpre, pre.grad)
    torch.testing.assert_close(partial.sum(0), pre.grad.sum(0))
