"""Compile the attention half's default choices for one GPU generation; prints JSON lines.

A program of its own: Triton decides once per process whether kernels are interpreted. Its argument
is the capability, 90 for 9.0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from unittest import mock

import torch

from fastswin.ops.attention_half import heads, hopper_launch, whole
from fastswin.ops.attention_half.hopper_config import (
    default_hopper_whole_config,
    default_hopper_windows_config,
    hopper_whole_blocker,
    hopper_windows_blocker,
)
from fastswin.testing import aot

#: Multiprocessors of a card of each generation: A100, RTX 3090, L4, H100.
MULTIPROCESSORS = {80: 108, 86: 82, 89: 58, 90: 132}

#: (form, version of Swin, channels, heads, map side) that each generation compiles: its extremes.
SELECTED = {
    80: (("heads", 1, 96, 3, 56),),
    86: (("window", 1, 128, 4, 56),),
    89: (("window", 2, 96, 3, 64),),
    90: (
        ("heads", 1, 512, 16, 14),
        ("window", 1, 192, 6, 28),
        ("window", 2, 96, 3, 64),
        ("hopper", 1, 512, 16, 14),
        ("hopper", 2, 384, 12, 16),
        ("windows", 1, 384, 12, 14),
        ("windows", 1, 512, 16, 14),
        ("windows", 1, 192, 6, 28),
        ("windows", 2, 384, 12, 16),
        ("whole", 1, 96, 3, 56),
        ("whole", 2, 96, 3, 64),
        ("whole", 1, 128, 4, 56),
        ("whole", 2, 128, 4, 64),
    ),
}


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch(form: str, version: int, C: int, nH: int, side: int) -> None:
    """A shifted block as the engine runs it: V1 in windows of 7, V2 of 8."""
    half, v2 = torch.float16, version == 2
    window = (8, 8) if v2 else (7, 7)
    shift = (0, 0) if side == 7 else (window[0] // 2,) * 2
    x, weight = empty(1, side, side, C, dtype=half), empty(3 * C, C, dtype=half)
    bias = empty(1 if side == 7 else 4, nH, 64, 64, dtype=torch.float32 if v2 else half)
    head_scale, offset = (empty(nH), None) if v2 else (None, empty(C))
    shared = (head_scale, empty(3 * C, dtype=half))
    if form == "hopper":
        eps, stats = (None, None) if v2 else (1e-5, empty(2, C // 64, side * side))
        hopper_launch.hopper_heads_fwd(
            x, weight, empty(3, 3 * C), bias, head_scale, 0.2, nH, window, shift, eps, True, stats
        )
        return
    if form == "windows":  # a batch of 8, whose rows have no statistics
        config = default_hopper_windows_config(
            C, 8 * (side // window[0]) ** 2, MULTIPROCESSORS[90]
        )  # fmt: skip
        assert hopper_windows_blocker(C, nH, window, (side, side), config) is None
        hopper_launch.hopper_windows_fwd(
            empty(8, side, side, C, dtype=half), weight, empty(3, 3 * C), bias, head_scale, 0.2, nH,
            window, shift, None if v2 else 1e-5, True, None, config,
        )  # fmt: skip
        return
    if form == "whole":  # batches of 8 and 32, whose default choices have two and three groups
        norm_first = not v2
        for batch in (8, 32):
            windows = batch * (side // window[0]) ** 2
            tiles = default_hopper_whole_config(C, windows, MULTIPROCESSORS[90])
            assert hopper_whole_blocker(C, nH, window, (side, side), tiles) is None
            many = empty(batch, side, side, C, dtype=half)
            hopper_launch.hopper_whole_fwd(
                many, weight, empty(6, C), empty(4, nH, 64, 64, dtype=half), head_scale,
                empty(C, C, dtype=half), 0.2, nH, window, shift, 1e-5, norm_first, many, True,
                tiles,
            )  # fmt: skip
        return
    if form == "heads":
        heads.heads_attention_fwd(
            x, weight, empty(3, 3 * C), offset, bias, *shared, 0.2, nH, window, shift,
            None if v2 else 1e-5, pdl=True,
        )  # fmt: skip
        return
    norm = empty(C) if v2 else None
    whole.whole_window_fwd(
        x, weight, empty(3 * C), offset, bias, *shared, empty(C, C, dtype=half), empty(C), norm,
        norm, 0.2, nH, window, shift, 1e-5, not v2, out=x, pdl=True,
    )  # fmt: skip


def run_as(capability: int) -> contextlib.ExitStack:
    """The launchers see this card instead of the interpreter's stand-in."""
    stack = contextlib.ExitStack()
    answers = {
        "device_capability": divmod(capability, 10),
        "multiprocessor_count": MULTIPROCESSORS[capability],
    }
    for module in (heads, whole):
        for question in answers.keys() & vars(module):
            answer = answers[question]
            stack.enter_context(mock.patch.object(module, question, return_value=answer))
    return stack


if __name__ == "__main__":
    target = int(sys.argv[1])
    with run_as(target), aot.record_launches() as launches:
        for problem in SELECTED[target]:
            launch(*problem)
    for one in launches:
        compiled = dataclasses.asdict(aot.compile_launch(one, target))
        if one.kernel.is_gluon():
            compiled["fills_with_zeros"] = aot.fills_with_zeros(one, target)
        print(json.dumps(compiled), flush=True)
