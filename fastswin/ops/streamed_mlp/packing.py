"""Weights of the streamed MLP, in the order in which programs ask for them.

    fc1 [H, C], fc2 [C, H]   ->   chunks [P * 2 steps * C, 64]

A chunk is what 64 hidden units have of one layer, as C / 64 tiles ``[64, 64]``: of fc1 units by
channels, of fc2 channels by units. fc1 of a step stands before fc2 of the step before, since it is
multiplied at the same time and its slot of the ring is empty first:

    fc1(0) fc1(1) fc2(0) fc1(2) fc2(1) ... fc1(last) fc2(last - 1) fc2(last)

fc1 and its bias are halved, which is exact: GELU begins with half its argument.
"""

from __future__ import annotations

import torch

from fastswin.ops.streamed_mlp.config import STEP


def pack_chunks(fc1_weight: torch.Tensor, fc2_weight: torch.Tensor, programs: int) -> torch.Tensor:
    """Chunks of all programs, one program's behind the other's.

    Args:
        fc1_weight, fc2_weight: ``[H, C]`` and ``[C, H]``.
        programs: that share the hidden units.
    """
    H, C = fc1_weight.shape
    steps = H // (STEP * programs)
    fc1 = (fc1_weight * 0.5).view(programs, steps, STEP, C // STEP, STEP).transpose(2, 3)
    fc2 = fc2_weight.view(C, programs, steps, STEP).permute(1, 2, 0, 3)
    both = torch.stack((fc1.reshape(programs, steps, C, STEP), fc2), 2)
    order = [0, *(place for s in range(1, steps) for place in (2 * s, 2 * s - 1)), 2 * steps - 1]
    ordered = both.reshape(programs, 2 * steps, C, STEP)[:, order]
    return ordered.reshape(-1, STEP).contiguous()
