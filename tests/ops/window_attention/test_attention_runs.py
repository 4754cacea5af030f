"""Runs of windows of one kind: every window once, with the answers of windows one by one."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from fastswin.ops.window_attention.backward import window_attention_bwd
from fastswin.ops.window_attention.backward_config import (
    WholeBackwardConfig,
    default_backward_config,
)
from fastswin.ops.window_attention.backward_problem import Needs
from fastswin.ops.window_attention.config import MIN_RUN, RUN_PROGRAMS, default_config
from fastswin.ops.window_attention.forward import window_attention_fwd
from fastswin.ops.window_attention.geometry import num_windows, window_kinds
from fastswin.ops.window_attention.launch import AttentionShape, Dropout
from fastswin.ops.window_attention.runs import INTERLEAVED, Runs, plan_runs
from fastswin.ops.window_attention.tables import pack_tables


def windows_of(runs: Runs, grid: tuple[int, int], shifted: bool) -> list[list[tuple[int, ...]]]:
    """(kind, image, row, column) of every run, as the kernels walk."""
    bounds = [0, *runs.first, runs.total] if shifted else [0, runs.total, *[runs.total] * 3]
    rows, cols = grid
    found = []
    for kind, (first, last) in enumerate(itertools.pairwise(bounds)):
        height = 1 if kind >= 2 else rows - shifted
        width = 1 if kind % 2 else cols - shifted
        for run in range(first, last):
            count = runs.images * height * width
            places = range(run - first, count, last - first)
            if not INTERLEAVED:
                start = (run - first) * runs.steps
                places = range(start, min(start + runs.steps, count))
            found.append([
                (kind, p // (height * width),
                 rows - 1 if kind >= 2 else p // width % height,
                 cols - 1 if kind % 2 else p % width)
                for p in places
            ])  # fmt: skip
    return found


@pytest.mark.parametrize("programs", [1, 7, 264], ids="{} programs".format)
@pytest.mark.parametrize("shift", [(0, 0), (3, 3), (0, 2)], ids=str)
@pytest.mark.parametrize("map_size", [(56, 56), (14, 35), (7, 7), (7, 21), (30, 17)], ids=str)
def test_every_window_is_in_one_run_of_its_kind(map_size, shift, programs):
    grid, images = num_windows(map_size, (7, 7)), 5
    shape = AttentionShape(
        images * grid[0] * grid[1], map_size, grid, 3, 32, (7, 7), shift, partitioned=False
    )
    runs = plan_runs(shape, programs)
    shifted = sum(shift) > 0
    dealt = windows_of(runs, grid, shifted)
    kinds = window_kinds(map_size, (7, 7)).view(grid).tolist()
    everything = sorted(itertools.chain(*dealt))
    assert everything == sorted(
        (kinds[row][col] if shifted else 0, image, row, col)
        for image in range(images) for row in range(grid[0]) for col in range(grid[1])
    )  # fmt: skip
    assert max(map(len, dealt)) <= runs.steps
    assert len(dealt) == runs.total <= max(programs // 3, 4)


def test_runs_of_the_first_stage_are_even():
    shape = AttentionShape(8192, (56, 56), (8, 8), 3, 32, (7, 7), (3, 3), partitioned=False)
    runs = plan_runs(shape, 264)
    assert (runs.steps, runs.first, runs.total) == (96, (66, 76, 86), 88)
    assert plan_runs(dataclasses.replace(shape, shift_size=(0, 0)), 264).steps == 94


#: map, window, shift, cosine, dropout, dtype, whether the bias is held
FORMS = {
    "shifted": ((8, 12), (4, 4), (2, 2), False, 0.0, torch.float16, True),
    "columns shifted, 7 x 7": ((7, 14), (7, 7), (0, 3), False, 0.0, torch.float16, False),
    "one row of windows, dropout": ((4, 12), (4, 4), (2, 2), False, 0.3, torch.float32, True),
    "padded": ((7, 6), (4, 4), (2, 2), False, 0.0, torch.float16, True),
    "padded, cosine, dropout": ((7, 6), (4, 4), (2, 2), True, 0.3, torch.float32, False),
    "cosine, no shift": ((8, 4), (4, 4), (0, 0), True, 0.0, torch.float16, True),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_answers_are_those_of_single_windows(form, randn):
    map_size, window, shift, cosine, p, dtype, held = FORMS[form]
    on_gpu = torch.cuda.is_available()
    if on_gpu and dtype == torch.float16 and not held:
        dtype = torch.bfloat16
    B, heads, D = 2, 1 if p else 2, 16
    N, C = window[0] * window[1], heads * D
    qkv, grad = randn(B, *map_size, 3 * C, dtype=dtype), randn(B, *map_size, C, dtype=dtype)
    qkv_bias = randn(3 * C, dtype=dtype)
    temperature = randn(heads) + 2 if cosine else None
    bias = randn(heads, N, N)
    packed, head_scale = pack_tables(bias, temperature, heads, window, shift, qkv.device)
    seed = torch.full((1,), 9, dtype=torch.int64, device=qkv.device)
    dropout = Dropout(seed, p) if p else None
    grid = num_windows(map_size, window)
    windows = B * grid[0] * grid[1]
    padded = map_size[0] % window[0] + map_size[1] % window[1] > 0
    needs = Needs(True, True, True, bias=True, logit_scale=cosine, pad=padded, qkv_sum=True)
    shared = (packed, head_scale, qkv_bias, D**-0.5, heads, window, shift, False)

    def run(programs: int, config: WholeBackwardConfig) -> list[torch.Tensor]:
        forward = default_config(windows, N, heads, D, dtype.itemsize, 132)
        stats = torch.full((windows, heads, N, 2), float("nan"), device=qkv.device)
        out = window_attention_fwd(
            qkv, *shared, row_stats=stats, dropout=dropout,
            config=dataclasses.replace(forward, num_stages=2, programs=programs),
        )  # fmt: skip
        dqkv, sums = window_attention_bwd(
            grad, qkv, None, None, *shared, needs, dropout, dataclasses.replace(config, programs=9)
        )
        found = [out, stats, dqkv, sums.bias, sums.qkv_bias, sums.logit_scale]
        return [t.double() for t in found if t is not None]

    config = WholeBackwardConfig(by_kind=True, holds_bias=held)
    in_runs = run(10, config)
    tolerance = 4 * torch.finfo(dtype).eps
    for ours, theirs in zip(in_runs, run(0, WholeBackwardConfig()), strict=True):
        assert (ours - theirs).abs().max() <= tolerance * max(1.0, theirs.abs().max())
    if on_gpu:
        assert all(map(torch.equal, run(10, config), in_runs))


def test_what_goes_in_runs():
    """V1 of 2 bytes from compute capability 9.0 on, where a program gets some windows."""
    least = MIN_RUN * RUN_PROGRAMS // 3
    assert default_config(least, 49, 3, 32, 2, 132, (9, 0), runs=True).programs == RUN_PROGRAMS
    for problem in (
        (least - 1, 49, 3, 32, 2, 132, (9, 0), True), (least, 49, 3, 32, 2, 132, (9, 0), False),
        (least, 49, 3, 32, 4, 132, (9, 0), True), (least, 49, 3, 32, 2, 132, (8, 0), True),
        (least, 144, 3, 32, 2, 132, (9, 0), True),
    ):  # fmt: skip
        assert default_config(*problem).programs == 0
    assert default_backward_config(49, 32, 2).by_kind
    for options in ({"capability": (8, 0)}, {"plain": False}):
        assert not default_backward_config(49, 32, 2, **options).by_kind
