"""The Hopper form of heads over long windows on a CPU: its own source, and who may take it."""

from __future__ import annotations

import pytest
import torch
from gluon_threads import Descriptor, Pointer, run_source
from group_copies import Copies
from hopper_heads_cases import make_problem

from fastswin.ops.attention_half import hopper_launch, hopper_long
from fastswin.ops.attention_half.hopper_config import hopper_long_blocker, hopper_long_slots
from fastswin.ops.window_attention.config import padded_tokens
from fastswin.ops.window_attention.packing import LOG2_E
from fastswin.testing.tolerance import assert_close_to_oracle


def run_on_cpu(problem, copies=None, slots=None):
    """What the kernel writes into NaN, with NaN in shared memory."""
    x, weight, vectors, table, _, scale, num_heads, window, shift, eps = problem.packed()
    stats = problem.statistics()
    B, H, W, C = x.shape
    per_col, per_row = H // window[0], W // window[1]
    out = torch.full_like(x, float("nan"))
    width = next(channels for channels in (256, 128, 64) if C % channels == 0)
    arguments = (
        Pointer(x.reshape(-1)), Descriptor(weight, [32, width]), Pointer(vectors.reshape(-1)),
        Pointer(table.reshape(-1)), Pointer(out.view(-1)),
        Pointer((vectors if stats is None else stats).reshape(-1)), scale * LOG2_E, eps or 0.0,
        H, W, per_col, per_row, B * H * W,
    )  # fmt: skip
    constants = {
        "C": C, "NH": num_heads, "N": window[0] * window[1],
        "NP": padded_tokens(window[0] * window[1]), "WH": window[0], "WW": window[1],
        "SH": shift[0], "SW": shift[1], "PARTS": 0 if stats is None else stats.shape[1],
        "SLOTS": slots or hopper_long_slots(C), "REGISTERS": 0, "PDL": False,
    }  # fmt: skip
    run_source(
        hopper_long, "_hopper_long_kernel", B * per_col * per_row * num_heads, arguments,
        constants, async_copy=copies or Copies(),
    )  # fmt: skip
    return out


def check(problem, out):
    assert_close_to_oracle(
        out, problem.reference(torch.float16), problem.reference(torch.float64), torch.float16
    )


SETTINGS = [
    {"heads": 4, "parts": 2, "windows": (2, 2), "shift": (6, 6)},
    {"heads": 6, "windows": (1, 3), "shift": (0, 0)},
    {"heads": 2, "window": (10, 13), "shift": (5, 0), "windows": (2, 1), "batch": 2},
    {"heads": 8, "window": (8, 20), "shift": (4, 10), "windows": (1, 2)},
    {"heads": 4, "parts": None, "shift": (6, 6), "windows": (1, 2)},
    {"heads": 4, "parts": 2, "shift": (6, 6), "offset": 60.0},
]


@pytest.mark.parametrize("slots", [2, 3, None])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_source_on_a_cpu(settings, slots):
    problem = make_problem(**{"window": (12, 12)} | settings)
    if slots is not None and slots > problem.made["x"].shape[-1] // 64:
        pytest.skip("a ring has no more tiles than steps")
    check(problem, run_on_cpu(problem, slots=slots))


@pytest.mark.parametrize("slots", [2, 3])
def test_rows_that_come_early_destroy_nothing(slots):
    """Tiles are asked for again only when they have been read."""
    problem = make_problem(heads=8, window=(12, 12), shift=(6, 6), windows=(1, 2))
    check(problem, run_on_cpu(problem, Copies(at_once=True), slots))


@pytest.mark.parametrize("slots", [2, 3])
def test_rows_that_are_read_before_they_are_there_would_show(slots):
    class Hasty(Copies):
        def wait_group(self, behind):
            super().wait_group(behind + 1)

    problem = make_problem(heads=8, window=(12, 12), shift=(6, 6), windows=(1, 2))
    assert run_on_cpu(problem, Hasty(), slots).isnan().any()


@pytest.mark.parametrize(("C", "slots"), [(64, 1), (128, 2), (256, 4), (512, 5), (768, 3)])
def test_tiles_of_rows(C, slots):
    assert hopper_long_slots(C) == slots


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_heads": 2, "C": 64}, "2 to 12 times 64 channels are needed, not 64"),
        ({"num_heads": 32, "C": 1024}, "2 to 12 times 64 channels are needed, not 1024"),
        ({"num_heads": 8}, "heads of 32 channels are needed, not 8 in 128"),
        ({"window_size": (7, 7)}, "129 to 160 tokens are needed, not 49"),
        ({"map_size": (24, 25)}, r"a map of \(24, 25\) is no multiple of a window of \(12, 12\)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_halves_that_it_does_not_take(changed, words):
    half = {"C": 128, "num_heads": 4, "window_size": (12, 12), "map_size": (24, 24)}
    assert hopper_long_blocker(**half) is None
    reason = hopper_long_blocker(**half | changed)
    assert reason is not None
    with pytest.raises(ValueError, match=words):
        raise ValueError(reason)


def test_an_epsilon_without_statistics_is_refused():
    problem = make_problem(heads=4, window=(12, 12), shift=(6, 6))
    x, weight, vectors, table, _, *rest = problem.packed()
    with pytest.raises(ValueError, match="give eps and norm_stats together"):
        hopper_launch.hopper_long_fwd(x, weight, vectors, table, *rest)
