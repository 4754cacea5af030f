"""The Hopper form of the whole half on a CPU: its own source, and who may take it."""

from __future__ import annotations

import threading
import types

import pytest
import torch
from gluon_threads import Descriptor, Pointer, _init, run_source
from group_copies import Copies
from hopper_whole_cases import make_whole

from fastswin.ops.attention_half import hopper_whole
from fastswin.ops.attention_half.hopper_config import (
    HOPPER_BYTES,
    HOPPER_WHOLE_WIDTH,
    HopperWholeConfig,
    default_hopper_whole_config,
    hopper_whole_blocker,
)
from fastswin.ops.window_attention.packing import LOG2_E
from fastswin.testing.tolerance import assert_close_to_oracle


def run_on_cpu(problem, config, in_place=False, **stand_ins):
    """What the kernel writes into NaN, or x, with NaN in shared memory."""
    (x, weight, vectors, table, head_scale, proj, scale, num_heads, window, shift, eps,
     norm_first) = problem.packed()  # fmt: skip
    B, H, W, C = x.shape
    per_col, per_row = H // window[0], W // window[1]
    windows = B * per_col * per_row
    x = x.clone()
    out = x if in_place else torch.full_like(x, float("nan"))
    width = HOPPER_WHOLE_WIDTH[C]
    arguments = (
        Pointer(x.view(-1)), Descriptor(weight, [128, width]), Descriptor(proj, [128, 32]),
        Descriptor(table.view(-1, 64), [64, 64]), Pointer(vectors.view(-1)),
        Pointer(vectors.view(-1) if head_scale is None else head_scale), Pointer(out.view(-1)),
        scale * LOG2_E, eps, H, W, per_col, per_row, torch.tensor(windows, dtype=torch.int32),
        config.windows,
    )  # fmt: skip
    constants = {
        "C": C, "WIDTH": width, "NH": num_heads, "N": window[0] * window[1], "WH": window[0],
        "WW": window[1], "SH": shift[0], "SW": shift[1], "COSINE": head_scale is not None,
        "NORM_FIRST": norm_first, "VALUES": 1024, "GROUPS": config.groups,
        "LOOP": config.windows > config.groups, "REGISTERS": 0, "PDL": False,
    }  # fmt: skip
    run_source(
        hopper_whole, "_hopper_whole_kernel", -(-windows // config.windows), arguments, constants,
        **{"async_copy": Copies()} | stand_ins,
    )  # fmt: skip
    return out


def check(problem, out):
    dtype = problem.made["x"].dtype
    assert_close_to_oracle(out, problem.reference(dtype), problem.reference(torch.float64), dtype)


#: (windows a program, groups), of which the last program's are fewer.
FORMS = [(1, 1), (3, 1), (3, 3), (5, 2), (7, 3), (2, 2)]

SETTINGS = [
    {"batch": 2},
    {"heads": 4, "windows": (1, 5), "shift": (0, 0)},
    {"version": 2, "window": (8, 8), "shift": (4, 4)},
    {"heads": 4, "version": 2, "window": (7, 8), "shift": (3, 0), "windows": (2, 3)},
    {"window": (5, 10), "shift": (0, 5), "windows": (3, 2), "table": torch.float32},
    {"heads": 4, "dtype": torch.bfloat16, "window": (4, 16), "shift": (2, 8), "windows": (1, 2)},
    {"version": 2, "dtype": torch.bfloat16, "windows": (2, 1), "batch": 3},
    {"heads": 4, "offset": 60.0},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_source_on_a_cpu(settings, form):
    """Every second problem's result takes the place of its input."""
    problem = make_whole(**settings)
    in_place = (SETTINGS.index(settings) + FORMS.index(form)) % 2 == 0
    check(problem, run_on_cpu(problem, HopperWholeConfig(*form), in_place))


@pytest.mark.parametrize("form", [(4, 3), (5, 2), (13, 3), (6, 1)], ids=str)
@pytest.mark.parametrize("version", [1, 2])
def test_shares_that_are_not_even(version, form):
    """13 windows: the last program's groups have none, one, or fewer than the others'."""
    problem = make_whole(batch=13, windows=(1, 1), version=version)
    check(problem, run_on_cpu(problem, HopperWholeConfig(*form), in_place=True))


@pytest.mark.parametrize("heads", [3, 4])
@pytest.mark.parametrize("form", [(4, 1), (5, 2)], ids=str)
def test_rows_that_come_early_destroy_nothing(form, heads):
    """A tile is asked for again only when it has been read."""
    problem = make_whole(heads=heads, batch=2)
    out = run_on_cpu(
        problem, HopperWholeConfig(*form), in_place=True, async_copy=Copies(at_once=True)
    )
    check(problem, out)


def test_rows_that_are_read_before_they_are_there_would_show():
    problem = make_whole(batch=2)

    class Hasty(Copies):
        def wait_group(self, behind):
            super().wait_group(behind + 1)

    out = run_on_cpu(problem, HopperWholeConfig(4, 1), async_copy=Hasty())
    with pytest.raises(AssertionError):
        check(problem, out)


class LateCopies:
    """The copy engine as slow as can be: a tile lands when its barrier is waited for.

    ``obeyed``: waits after so many end before the tile is there.
    """

    def __init__(self, obeyed: int | None = None) -> None:
        self.lock = threading.Lock()
        self.pending: dict[int, list] = {}
        self.obeyed = obeyed

    def stand_ins(self):
        """For the kernel's ``tma`` and ``mbarrier``."""
        barriers = types.SimpleNamespace(
            init=_init, MBarrierLayout=lambda: None, wait=self.wait,
            expect=lambda barrier, size, pred=True: barrier.arrive(1, size) if pred else None,
        )  # fmt: skip
        return {
            "tma": types.SimpleNamespace(async_copy_global_to_shared=self.ask), "mbarrier": barriers
        }  # fmt: skip

    def ask(self, desc, at, barrier, tile, pred=True):
        if pred:
            with self.lock:
                self.pending.setdefault(id(barrier), []).append((desc, at, tile))

    def wait(self, barrier, phase):
        with self.lock:
            for desc, at, tile in self.pending.pop(id(barrier), []):
                if self.obeyed != 0:
                    tile.data.copy_(desc.read(at))
                barrier.landed(desc.block_type.nbytes)
        if self.obeyed:
            self.obeyed -= 1
        barrier.wait(int(phase))


@pytest.mark.parametrize("form", [(4, 1), (5, 2), (7, 3)], ids=str)
def test_weights_and_tables_that_come_late(form):
    problem = make_whole(batch=2)
    check(problem, run_on_cpu(problem, HopperWholeConfig(*form), **LateCopies().stand_ins()))


def test_tables_that_are_read_before_they_are_there_would_show():
    """The first wait is for the weights, those behind it for tables."""
    problem = make_whole(batch=2)
    late = LateCopies(obeyed=1).stand_ins()
    assert run_on_cpu(problem, HopperWholeConfig(4, 1), **late).isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_statistics_of_a_large_mean(dtype):
    """Rows of mean 50 and deviation 1: sums of squares around 0 would lose three digits."""
    problem = make_whole(heads=4, dtype=dtype)
    x = problem.made["x"]
    problem.made["x"] = (50 + torch.randn(x.shape)).to(dtype)
    check(problem, run_on_cpu(problem, HopperWholeConfig(3, 2)))


def test_a_branch_of_a_large_mean_in_front_of_the_second_norm():
    problem = make_whole(version=2)
    problem.made["proj_bias"] += 200
    check(problem, run_on_cpu(problem, HopperWholeConfig(3, 2)))


@pytest.mark.parametrize("missing", ["qkv_bias", "proj_bias"])
def test_a_bias_that_is_not_there_is_zero(missing):
    problem = make_whole()
    problem.made[missing] = None
    check(problem, run_on_cpu(problem, HopperWholeConfig(2, 2)))


@pytest.mark.parametrize(
    ("C", "windows", "expected"),
    [
        (96, 512, HopperWholeConfig(4, 2)),
        (96, 2048, HopperWholeConfig(16, 2)),
        (96, 64, HopperWholeConfig(1, 1)),
        (96, 300, HopperWholeConfig(3, 2)),
        (128, 512, HopperWholeConfig(4, 2)),
        (128, 300, HopperWholeConfig(3, 2)),
        (128, 0, HopperWholeConfig(1, 1)),
    ],
)
def test_one_program_a_multiprocessor(C, windows, expected):
    config = default_hopper_whole_config(C, windows, 132)
    assert -(-windows // config.windows) <= 132
    assert config == expected
    assert config.shared_bytes(C) <= HOPPER_BYTES


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_heads": 6, "C": 192}, "not 6 in 192"),
        ({"num_heads": 6}, "not 6 in 96"),
        ({"num_heads": 4, "C": 128, "config": HopperWholeConfig(3, 3)}, "bytes of weights"),
        ({"config": HopperWholeConfig(3, 4)}, "1 to 3 groups"),
        ({"config": HopperWholeConfig(0, 2)}, "1 to 3 groups"),
        ({"window_size": (6, 8)}, "49 to 64 tokens are needed, not 48"),
        ({"map_size": (14, 15)}, r"a map of \(14, 15\) is no multiple of a window of \(7, 7\)"),
        ({"map_size": (7 * 700, 7 * 700)}, "addressed in 32 bits"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_halves_that_it_does_not_take(changed, words):
    half = {"C": 96, "num_heads": 3, "window_size": (7, 7), "map_size": (14, 14)}
    assert hopper_whole_blocker(**half) is None
    assert hopper_whole_blocker(**half, config=HopperWholeConfig(16, 3)) is None
    reason = hopper_whole_blocker(**half | changed)
    assert reason is not None
    with pytest.raises(ValueError, match=words):
        raise ValueError(reason)
