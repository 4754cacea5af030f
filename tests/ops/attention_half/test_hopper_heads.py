"""The Hopper form by heads on a CPU: its own source, program by program, and who may take it."""

from __future__ import annotations

import pytest
import torch
from gluon_threads import Descriptor, Pointer, run_source
from group_copies import Copies
from hopper_heads_cases import EPS, make_problem

from fastswin.engine.operators import packed_heads_attention
from fastswin.ops.attention_half import heads, hopper_config, hopper_heads, hopper_launch
from fastswin.ops.attention_half.config import HeadsConfig
from fastswin.ops.attention_half.hopper_config import (
    HopperHeadsConfig,
    hopper_heads_blocker,
    hopper_heads_steps,
)
from fastswin.ops.window_attention.packing import LOG2_E
from fastswin.testing.tolerance import assert_close_to_oracle


def run_on_cpu(problem, slots=None, **stand_ins):
    """What the kernel writes into NaN, with NaN in shared memory."""
    x, weight, vectors, table, head_scale, scale, num_heads, window, shift, eps = problem.packed()
    stats = problem.statistics()
    B, H, W, C = x.shape
    per_col, per_row = H // window[0], W // window[1]
    out = torch.full_like(x, float("nan"))

    def pointer(tensor):
        return Pointer((vectors if tensor is None else tensor).reshape(-1))

    out_pointer = Pointer(out.view(-1))
    width = next(channels for channels in (256, 128, 64) if C % channels == 0)
    span, room = hopper_heads_steps(C)
    arguments = (
        pointer(x), Descriptor(weight, [32, width]), pointer(vectors), pointer(table),
        pointer(head_scale), out_pointer, pointer(stats), scale * LOG2_E, eps or 0.0, H, W,
        per_col, per_row, B * H * W,
    )  # fmt: skip
    constants = {
        "C": C, "NH": num_heads, "N": window[0] * window[1], "WH": window[0], "WW": window[1],
        "SH": shift[0], "SW": shift[1], "COSINE": head_scale is not None,
        "PARTS": 0 if stats is None else stats.shape[1], "SPAN": span,
        "SLOTS": slots or room, "PDL": False,
    }  # fmt: skip
    run_source(
        hopper_heads, "_hopper_heads_kernel", B * per_col * per_row * num_heads, arguments,
        constants, **{"async_copy": Copies()} | stand_ins,
    )  # fmt: skip
    return out


def check(problem, out):
    dtype = problem.made["x"].dtype
    assert_close_to_oracle(out, problem.reference(dtype), problem.reference(torch.float64), dtype)


@pytest.mark.parametrize(
    "settings",
    [
        {"heads": 4, "parts": 2, "batch": 2},
        {"heads": 6, "parts": 6, "windows": (1, 2), "shift": (0, 0)},
        {"heads": 10, "parts": 5, "windows": (2, 1)},
        {"heads": 16, "parts": 4, "windows": (1, 2)},
        {"heads": 24, "parts": 12, "windows": (1, 2)},
        {"version": 2, "heads": 24, "window": (8, 8), "shift": (0, 0), "windows": (1, 1)},
        {"version": 2, "window": (8, 8), "shift": (4, 4)},
        {"version": 2, "heads": 4, "window": (7, 8), "shift": (3, 0), "windows": (2, 3)},
        {"window": (5, 10), "shift": (0, 5), "parts": 2},
        {"window": (4, 16), "shift": (2, 8), "windows": (1, 2)},
        {"parts": 2, "offset": 60.0},
        {"heads": 6, "parts": 2, "dtype": torch.bfloat16},
        {"version": 2, "dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_source_on_a_cpu(settings):
    problem = make_problem(**settings)
    check(problem, run_on_cpu(problem))


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("heads", "slots"), [(24, None), (24, 8), (12, 4), (6, 2)])
def test_tiles_that_are_filled_again(heads, slots, at_once):
    """Copies into a tile that has not been read, or rows that are not there yet, would show."""
    problem = make_problem(heads=heads, parts=2, windows=(1, 1), shift=(0, 0))
    check(problem, run_on_cpu(problem, slots, async_copy=Copies(at_once)))


def test_the_widest_rows_take_tiles_again():
    assert [hopper_heads_steps(C) for C in (128, 192, 256, 384, 512, 640, 768)] == [
        (1, 2), (1, 3), (2, 4), (2, 6), (2, 8), (2, 10), (2, 10),
    ]  # fmt: skip


@pytest.mark.parametrize("late", [1, 2])
def test_rows_that_are_read_before_they_are_there_would_show(late):
    """Waiting for fewer groups leaves channels as they were."""
    problem = make_problem(heads=8, parts=2)

    class Hasty(Copies):
        def wait_group(self, behind):
            super().wait_group(behind + late)

    assert run_on_cpu(problem, async_copy=Hasty()).isnan().any()


def test_statistics_of_other_rows_would_show():
    problem = make_problem(parts=1)
    right = problem.statistics
    problem.statistics = lambda: right().roll(1, 2)
    with pytest.raises(AssertionError):
        check(problem, run_on_cpu(problem))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_heads": 3, "C": 96}, "an even number of heads of 32 channels .* not 3 in 96"),
        ({"num_heads": 8}, "not 8 in 128"),
        ({"num_heads": 26, "C": 832}, "128 to 768 channels are needed, not 832"),
        ({"num_heads": 2, "C": 64}, "not 64"),
        ({"window_size": (6, 8)}, "49 to 64 tokens are needed, not 48"),
        ({"window_size": (13, 5)}, "not 65"),
        ({"map_size": (14, 15)}, r"a map of \(14, 15\) is no multiple of a window of \(7, 7\)"),
        ({"map_size": (28672, 28672)}, "32 bits"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_halves_that_it_does_not_take(changed, words):
    half = {"C": 128, "num_heads": 4, "window_size": (7, 7), "map_size": (14, 14)}
    assert hopper_heads_blocker(**half) is None
    reason = hopper_heads_blocker(**half | changed)
    assert reason is not None
    with pytest.raises(ValueError, match=words):
        raise ValueError(reason)


def test_a_triton_without_its_dialect_says_so(monkeypatch):
    """Copies of 16 bytes a thread are a part of Gluon that the other Hopper kernels do not need."""
    monkeypatch.setattr(hopper_config, "why_no_gluon", lambda module: f"no {module}")
    reason = hopper_heads_blocker(128, 4, (7, 7), (14, 14))
    assert reason == "no fastswin.ops.attention_half.hopper_heads"


@pytest.mark.parametrize("version", [1, 2])
def test_a_norm_and_its_statistics_belong_together(version):
    """V1 without statistics would leave rows as they are, V2 with them would normalise."""
    problem = make_problem(version=version)
    wrong = None if version == 1 else torch.zeros(2, 1, 196)
    with pytest.raises(ValueError, match="eps and norm_stats together"):
        hopper_launch.hopper_heads_fwd(*problem.packed(), norm_stats=wrong)


def test_engine_falls_back_where_statistics_are_missing(monkeypatch):
    """V1 without statistics computes them: Triton's form. With them, and V2, Hopper's."""
    taken = []

    def note(form):
        return lambda *args, **kwargs: taken.append((form, kwargs.get("config")))

    monkeypatch.setattr(hopper_launch, "hopper_heads_fwd", note("hopper"))
    monkeypatch.setattr(heads, "heads_attention_fwd", note("triton"))
    packed = (None,) * 7 + (1.0, 2, (7, 7), (0, 0))  # x to pad_qkv, then what is no tensor
    for eps, stats, config in (
        (EPS, None, HopperHeadsConfig()), (EPS, torch.zeros(1), HopperHeadsConfig()),
        (None, None, HopperHeadsConfig()), (EPS, torch.zeros(1), HeadsConfig(64)),
    ):  # fmt: skip
        packed_heads_attention(*packed, eps, config, norm_stats=stats)
    assert taken == [
        ("triton", None), ("hopper", None), ("hopper", None), ("triton", HeadsConfig(64)),
    ]  # fmt: skip
