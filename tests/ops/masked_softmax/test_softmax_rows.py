"""Row plans: merging, the loop axis, filled blocks, and offsets past 2**31."""

import pytest
import torch

from fastswin._triton.device import multiprocessor_count
from fastswin.ops.masked_softmax.config import paired_config
from fastswin.ops.masked_softmax.launch import backward_problem, forward_problem
from fastswin.ops.masked_softmax.rows import plan_rows, power_of_2_divisor
from fastswin.ops.masked_softmax.sums import _four_axes


def test_plain_rows_merge_into_one_axis():
    plan = plan_rows((2, 3, 4), {"x": (120, 40, 10)}, [])
    assert (plan.loop, plan.sizes) == (1, (1, 1, 24))
    assert plan.strides["x"] == (0, 0, 0, 10)


def test_window_softmax_loops_over_images():
    strides = {"x": (6000, 600, 200, 10), "bias": (0, 0, 40, 4), "mask": (0, 40, 0, 4)}
    plan = plan_rows((5, 10, 3, 20), strides, ["bias", "mask"])
    assert (plan.loop, plan.sizes) == (5, (10, 3, 20))
    assert plan.strides["mask"] == (0, 40, 0, 4)


def test_more_row_axes_than_the_kernels_have():
    strides = {"x": (4096, 512, 64, 8), "m": (0, 7, 0, 1), "b": (9, 0, 5, 0)}
    assert plan_rows((2, 2, 2, 2), strides, ["m", "b"]) is None


def test_badly_filled_blocks_take_rows_from_the_loop():
    plan = plan_rows((64, 196), {"x": (1960, 10), "bias": (0, 10)}, ["bias"]).fill_blocks(64)
    assert (plan.loop, plan.sizes) == (16, (4, 1, 196)), "784 rows fill 13 blocks to 94 %"
    assert plan.strides["x"] == (4 * 1960, 1960, 0, 10)
    assert plan.strides["bias"] == (0, 0, 0, 10)


def test_odd_rows_take_a_second_image_to_make_pairs():
    strides = {"x": (147 * 49, 49), "bias": (0, 49)}
    plan = plan_rows((64, 147), strides, ["bias"]).fill_blocks(8, multiple=2)
    assert (plan.loop, plan.sizes) == (32, (2, 1, 147))
    assert plan.strides["bias"] == (0, 0, 0, 49)
    single = plan_rows((63, 147), strides, ["bias"])
    assert single.fill_blocks(8, multiple=2).rows % 2, "an odd loop has no pairs of images"


@pytest.mark.parametrize("shape", [(192, 64, 4, 49, 49), (64, 64, 3, 49, 49)], ids=str)
def test_a_backward_with_sums_never_exceeds_its_number_of_programs(shape):
    scores = torch.empty(shape, dtype=torch.float16, device="meta")
    bias = torch.empty(shape[2:], dtype=torch.float16, device="meta")
    problem = backward_problem(scores, scores, scores, {"bias": bias}, None, 1.0, False, None)
    wanted = paired_config(49, "backward").programs_per_multiprocessor
    wanted *= multiprocessor_count(scores.device)
    assert problem.form == "paired"
    assert 0.95 * wanted < problem.programs <= wanted


@pytest.mark.parametrize(
    ("moves", "want"),
    [
        ((0, 0, 49), (30, 1, 1, 4 * 49)),
        ((0, 7, 49), (10, 1, 1, 12 * 49)),
        ((7, 0, 49), (5, 2, 3, 4 * 49)),
        ((0, 7, 0), (10, 3, 4, 49)),
        ((7, 0, 0), (5, 2, 12, 49)),
        ((7, 7, 0), (5, 6, 4, 49)),
        ((0, 0, 0), (120, 1, 1, 49)),
        ((7, 7, 7), (5, 1, 1, 24 * 49)),
    ],
    ids=str,
)
def test_partial_sums_merge_to_four_axes(moves, want):
    assert _four_axes(torch.Size((5, 2, 3, 4, 49)), moves) == want


def test_power_of_2_divisor():
    assert power_of_2_divisor((49, 98), 8) == 1
    assert power_of_2_divisor((0, 48, 144), 8) == 8
    assert power_of_2_divisor((12,), 16) == 4


def row_offsets(arguments, names, constants, x="x"):
    """The kernel's own formula for the last row, with its argument widths."""
    value = dict(zip(names, arguments, strict=False))
    sizes = value["rows"] // (value["D1"] * value["D2"]), value["D1"], value["D2"]
    steps = [value[f"{x}{i}"] for i in range(3)]
    last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    last += (value["loop"] - 1) * value[f"{x}_step"]
    return last * constants[f"{x.upper()}_ALIGN"]


def test_offsets_past_2_to_the_31_are_exact_and_the_grid_has_one_axis():
    from fastswin.ops.masked_softmax.backward import _softmax_bwd_kernel
    from fastswin.ops.masked_softmax.forward import _softmax_fwd_kernel

    x = torch.empty(2097153, 1024, dtype=torch.float16, device="meta")
    problem = forward_problem(x, x, None, None, None, 1.0, False, None)
    names = _softmax_fwd_kernel.arg_names
    assert row_offsets(problem.arguments, names, problem.constants) == 2097152 * 1024
    assert isinstance(problem.programs, int)

    windows = torch.empty(270, 64, 6, 144, 144, dtype=torch.float16, device="meta")
    bias = torch.empty(6, 144, 144, device="meta")
    problem = backward_problem(
        windows, windows, windows, {"bias": bias}, None, 1.0, False, None
    )  # fmt: skip
    names = _softmax_bwd_kernel.arg_names
    last = (windows.numel() // 144 - 1) * 144
    assert row_offsets(problem.arguments, names, problem.constants, "y") == last
    assert problem.partial.numel() * 4 < 64 * 2**20, "sums stay small whatever the batch"
