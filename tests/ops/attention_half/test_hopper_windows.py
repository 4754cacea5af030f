"""The Hopper form of several windows a program on a CPU: its own source, and who may take it."""

from __future__ import annotations

import pytest
import torch
from gluon_threads import Descriptor, Pointer, run_source
from group_copies import Copies
from hopper_heads_cases import make_problem

from fastswin.ops.attention_half import hopper_launch, hopper_windows
from fastswin.ops.attention_half.hopper_config import (
    HopperWindowsConfig,
    default_hopper_windows_config,
    hopper_windows_blocker,
)
from fastswin.ops.window_attention.packing import LOG2_E
from fastswin.testing.tolerance import assert_close_to_oracle


def run_on_cpu(problem, config, copies=None, own_statistics=False):
    """What the kernel writes into NaN, with NaN in shared memory."""
    x, weight, vectors, table, head_scale, scale, num_heads, window, shift, eps = problem.packed()
    stats = None if own_statistics else problem.statistics()
    B, H, W, C = x.shape
    per_col, per_row = H // window[0], W // window[1]
    windows = B * per_col * per_row
    out = torch.full_like(x, float("nan"))

    def pointer(tensor):
        return Pointer((vectors if tensor is None else tensor).reshape(-1))

    arguments = (
        pointer(x), Descriptor(weight, [32, 64]), pointer(vectors), pointer(table),
        pointer(head_scale), Pointer(out.view(-1)), pointer(stats), scale * LOG2_E, eps or 0.0,
        H, W, per_col, per_row, B * H * W, torch.tensor(windows, dtype=torch.int32),
        config.windows,
    )  # fmt: skip
    constants = {
        "C": C, "NH": num_heads, "N": window[0] * window[1], "WH": window[0], "WW": window[1],
        "SH": shift[0], "SW": shift[1], "COSINE": head_scale is not None,
        "NORMALIZE": eps is not None, "PARTS": 0 if stats is None else stats.shape[1],
        "GROUPS": config.groups, "BUFFERS": config.buffers,
        "LOOP": config.windows > config.groups, "REGISTERS": 0, "PDL": False,
    }  # fmt: skip
    programs = num_heads * -(-windows // config.windows)
    run_source(
        hopper_windows, "_hopper_windows_kernel", programs, arguments, constants,
        async_copy=copies or Copies(),
    )  # fmt: skip
    return out


def check(problem, out):
    assert_close_to_oracle(
        out, problem.reference(torch.float16), problem.reference(torch.float64), torch.float16
    )


#: (windows a program, groups, buffers), of which the last program's are fewer.
FORMS = [(1, 1, 1), (3, 1, 1), (3, 1, 2), (3, 3, 1), (5, 2, 1), (5, 2, 2), (7, 3, 2), (2, 2, 1)]

SETTINGS = [
    {"heads": 4, "parts": 2, "batch": 2},
    {"heads": 6, "windows": (1, 5), "shift": (0, 0)},
    {"heads": 10, "windows": (2, 1), "batch": 4},
    {"heads": 4, "version": 2, "window": (8, 8), "shift": (4, 4)},
    {"heads": 8, "version": 2, "window": (7, 8), "shift": (3, 0), "windows": (2, 3)},
    {"heads": 4, "window": (5, 10), "shift": (0, 5), "windows": (3, 2)},
    {"heads": 6, "window": (4, 16), "shift": (2, 8), "windows": (1, 2), "batch": 2},
    {"heads": 4, "parts": 2, "offset": 60.0},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_source_on_a_cpu(settings, form):
    """Each form takes every second problem's statistics, and computes the others'."""
    problem = make_problem(**settings)
    given = (SETTINGS.index(settings) + FORMS.index(form)) % 2 == 0
    check(problem, run_on_cpu(problem, HopperWindowsConfig(*form), own_statistics=not given))


@pytest.mark.parametrize("form", [(4, 1, 1), (4, 1, 2), (5, 2, 1), (6, 3, 2)], ids=str)
def test_rows_that_come_early_destroy_nothing(form):
    """Tiles are asked for again only when they have been read, keys and values too."""
    problem = make_problem(heads=6, batch=2)
    config = HopperWindowsConfig(*form)
    check(problem, run_on_cpu(problem, config, Copies(at_once=True), own_statistics=True))


@pytest.mark.parametrize("form", [(4, 1, 1), (4, 1, 2), (3, 3, 1)], ids=str)
def test_rows_that_are_read_before_they_are_there_would_show(form):
    problem = make_problem(heads=6, batch=2)

    class Hasty(Copies):
        def wait_group(self, behind):
            super().wait_group(behind + 1 if behind else 0)

    assert run_on_cpu(problem, HopperWindowsConfig(*form), Hasty()).isnan().any()


@pytest.mark.parametrize("form", [(3, 1, 1), (3, 3, 1)], ids=str)
def test_own_statistics_of_a_large_mean(form):
    """Rows of mean 50 and deviation 1: sums of squares around 0 would lose three digits."""
    problem = make_problem(heads=6, parts=3)
    x = problem.made["x"]
    problem.made["x"] = (50 + torch.randn(x.shape)).to(x.dtype)
    own = run_on_cpu(problem, HopperWindowsConfig(*form), own_statistics=True)
    check(problem, own)
    given = run_on_cpu(problem, HopperWindowsConfig(*form))
    assert (own.float() - given.float()).abs().max() < 0.02


def test_own_statistics_where_the_first_channels_are_apart():
    """The channels whose mean is the pivot lie 30 deviations from the others."""
    problem = make_problem(heads=6, parts=3)
    problem.made["x"][..., 64:128] += 100
    check(problem, run_on_cpu(problem, HopperWindowsConfig(3), own_statistics=True))


@pytest.mark.parametrize(
    ("C", "windows", "expected"),
    [
        (384, 32, HopperWindowsConfig(3, 3, 1)),
        (384, 64, HopperWindowsConfig(6, 3, 1)),
        (512, 32, HopperWindowsConfig(4, 2, 1)),
        (192, 128, HopperWindowsConfig(6, 3, 2)),
        (256, 128, HopperWindowsConfig(8, 3, 1)),
        (384, 8, HopperWindowsConfig(1, 1, 1)),
    ],
)
def test_one_program_a_multiprocessor(C, windows, expected):
    config = default_hopper_windows_config(C, windows, 132)
    assert C // 32 * -(-windows // config.windows) <= 132
    assert config == expected


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_heads": 3, "C": 96}, "96 channels are fewer than 128"),
        ({"num_heads": 8}, "not 8 in 128"),
        ({"num_heads": 24, "C": 768}, "245760 bytes of weights and rows exceed"),
        ({"config": HopperWindowsConfig(3, 3, 2), "num_heads": 12, "C": 384}, "exceed"),
        ({"config": HopperWindowsConfig(3, 4)}, "1 to 3 groups"),
        ({"window_size": (6, 8)}, "49 to 64 tokens are needed, not 48"),
        ({"map_size": (14, 15)}, r"a map of \(14, 15\) is no multiple of a window of \(7, 7\)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_halves_that_it_does_not_take(changed, words):
    half = {"C": 128, "num_heads": 4, "window_size": (7, 7), "map_size": (14, 14)}
    assert hopper_windows_blocker(**half) is None
    reason = hopper_windows_blocker(**half | changed)
    assert reason is not None
    with pytest.raises(ValueError, match=words):
        raise ValueError(reason)


def test_statistics_without_a_norm_are_refused():
    problem = make_problem(version=2, heads=4)
    with pytest.raises(ValueError, match="norm_stats needs eps"):
        hopper_launch.hopper_windows_fwd(
            *problem.packed(), norm_stats=torch.zeros(2, 1, 196), config=HopperWindowsConfig(3)
        )
