"""Shapes, operands and launch configurations of the feed-forward benchmark.

    x, dy [M, C]    fc1 [4 C, C] and its bias    fc2 [C, 4 C]

of the stages of Swin-T and Swin-B at 224 pixels, 128 images, weights in fp32 as under autocast.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
import torch.nn.functional as F

from fastswin.ops.feed_forward.config import (
    EpilogueConfig,
    FeedForwardConfig,
    FusedConfig,
    default_config,
    epilogue_blocker,
    fused_blocker,
)

BATCH = 128

Tensors = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Operands:
    """One problem's tensors: rows, upstream gradient and weights in half precision, bias in fp32.

    Attributes:
        x, dy: ``[M, C]``.
        fc1, fc2: ``[hidden, C]`` and ``[C, hidden]``.
        bias: ``[hidden]``.
    """

    x: torch.Tensor
    dy: torch.Tensor
    fc1: torch.Tensor
    bias: torch.Tensor
    fc2: torch.Tensor

    def eager(self, dtype: torch.dtype | None = None) -> Tensors:
        """``(y, dx, dfc1, dbias, dfc2)`` of plain PyTorch, in ``dtype`` throughout."""
        dtype = dtype or self.x.dtype
        leaves = [t.to(dtype).requires_grad_() for t in (self.x, self.fc1, self.bias, self.fc2)]
        x, fc1, bias, fc2 = leaves
        y = F.linear(F.gelu(F.linear(x, fc1, bias)), fc2)
        return y.detach(), *torch.autograd.grad(y, leaves, self.dy.to(dtype))


@dataclasses.dataclass(frozen=True)
class FeedForwardProblem:
    """One stage.

    Attributes:
        case: key.
        rows: tokens of the batch, M.
        channels: C; the hidden map has ``ratio * C``.
        ratio: of the MLP.
    """

    case: str
    rows: int
    channels: int
    ratio: int = 4

    def make(
        self, device: torch.device, dtype: torch.dtype, rows: int | None = None, seed: int = 0
    ) -> Operands:
        """Random operands; ``rows`` other than the problem's for a check."""
        generator = torch.Generator(device).manual_seed(seed)
        M, C, hidden = rows or self.rows, self.channels, self.ratio * self.channels

        def randn(*shape: int, spread: float = 1.0) -> torch.Tensor:
            return spread * torch.randn(*shape, device=device, generator=generator)

        return Operands(
            randn(M, C).to(dtype), randn(M, C).to(dtype),
            randn(hidden, C, spread=C**-0.5).to(dtype), randn(hidden, spread=0.5),
            randn(C, hidden, spread=hidden**-0.5).to(dtype),
        )  # fmt: skip

    def shapes(self, dtype: torch.dtype) -> Operands:
        """The operands without data."""

        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="meta")

        M, C, hidden = self.rows, self.channels, self.ratio * self.channels
        bias = empty(hidden, dtype=torch.float32)
        return Operands(empty(M, C), empty(M, C), empty(hidden, C), bias, empty(C, hidden))


PROBLEMS = tuple(
    FeedForwardProblem(f"swin-{size} stage {stage + 1}: C {C << stage}", rows, C << stage)
    for size, C in (("t", 96), ("b", 128))
    for stage, rows in enumerate(BATCH * (56 >> stage) ** 2 for stage in range(4))
)

#: (rows, hidden units, warps, stages) of the fused forward.
_FORWARD_TILES = (
    (128, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2),
    (128, 64, 8, 3), (128, 128, 8, 2),
)  # fmt: skip

#: (rows, hidden units, warps, stages, copy engine stores, registers at most) of its backward.
_BACKWARD_TILES = (
    (128, 32, 8, 2, True, 128), (128, 32, 8, 2, False, 128), (128, 32, 8, 3, True, 128),
    (128, 64, 8, 2, True, 128), (128, 64, 8, 2, True, 0), (64, 64, 4, 2, True, 0),
    (64, 64, 4, 1, True, 0), (64, 32, 4, 2, True, 0), (64, 32, 4, 3, True, 0),
)  # fmt: skip

#: Channels from which dx alone takes 96 registers a thread: a limit only spills.
_NO_LIMIT_FROM = 192

#: (rows, columns, depth, warps, stages, programs per multiprocessor, copy engine for hidden tiles,
#: registers at most).
_EPILOGUE_TILES = (
    (128, 64, 64, 8, 3, 0, True, 0), (128, 64, 64, 8, 3, 0, False, 0),
    (128, 64, 64, 4, 3, 0, True, 0), (64, 128, 64, 4, 3, 0, True, 0),
    (64, 64, 64, 4, 4, 0, True, 0), (128, 64, 64, 8, 3, 3, True, 0),
    (256, 64, 64, 8, 3, 0, True, 0), (128, 128, 64, 8, 3, 0, True, 128),
)  # fmt: skip


def forward_candidates(problem: FeedForwardProblem) -> list[FusedConfig | EpilogueConfig]:
    """What is tried beside the library; the heuristic's choice first where it has one."""
    C, hidden = problem.channels, problem.ratio * problem.channels
    found: list[FusedConfig | EpilogueConfig] = []
    default = _default(problem).forward
    if isinstance(default, FusedConfig | EpilogueConfig):
        found.append(default)
    if fused_blocker(C, hidden, C) is None:
        found += [FusedConfig(*tile, tma=True) for tile in _FORWARD_TILES]
    if epilogue_blocker(C, hidden, C) is None:
        found += [EpilogueConfig(*tile) for tile in _EPILOGUE_TILES]
    return list(dict.fromkeys(found))


def backward_candidates(problem: FeedForwardProblem) -> list[FusedConfig | EpilogueConfig]:
    """As :func:`forward_candidates`."""
    C, hidden = problem.channels, problem.ratio * problem.channels
    found: list[FusedConfig | EpilogueConfig] = []
    default = _default(problem).backward
    if isinstance(default, FusedConfig | EpilogueConfig):
        found.append(default)
    if fused_blocker(C, hidden, C) is None:
        for rows, units, warps, stages, store, registers in _BACKWARD_TILES:
            limit = 0 if C >= _NO_LIMIT_FROM else registers
            found.append(FusedConfig(rows, units, warps, stages, True, store, limit))
    if epilogue_blocker(C, hidden, C) is None:
        found += [EpilogueConfig(*tile) for tile in _EPILOGUE_TILES]
    return list(dict.fromkeys(found))


def _default(problem: FeedForwardProblem) -> FeedForwardConfig:
    C = problem.channels
    return default_config(C, problem.ratio * C, C, torch.bfloat16, (9, 0))


def pairs(
    forward: list[FusedConfig | EpilogueConfig], backward: list[FusedConfig | EpilogueConfig]
) -> list[FeedForwardConfig]:
    """Configurations that compile everything: fused with fused, the others with each other."""
    found = []
    for kind in (FusedConfig, EpilogueConfig):
        firsts = [c for c in forward if isinstance(c, kind)]
        seconds = [c for c in backward if isinstance(c, kind)]
        for first, second in itertools.zip_longest(firsts, seconds):
            if firsts and seconds:
                found.append(FeedForwardConfig(first or firsts[0], second or seconds[0]))
    return found
