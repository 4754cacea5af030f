"""The kernel's own source, a cluster's programs as threads: results, and that races show."""

from __future__ import annotations

import functools
import time

import gluon_memory
import pytest
import torch
from gluon_clusters import (
    cluster_wait,
    expect_bytes,
    expect_bytes_late,
    me,
    receive_piece,
    run_clusters,
    send_piece,
    wait_bytes,
)
from gluon_memory import PATIENCE, Descriptor
from swin_block_cases import in_double, make_block

from fastswin.ops.swin_block import launch, swin_block
from fastswin.ops.swin_block.config import live_threads
from fastswin.ops.swin_block.packing import pack_block
from fastswin.ops.window_attention.packing import pack_bias, pack_head_scale
from fastswin.testing.tolerance import assert_close_to_oracle

torch.set_num_threads(1)

#: Windows of a map down and across: one that is last in both, a row, a map of all four kinds.
ONE, ROW, MAP = (1, 1), (1, 3), (3, 2)

#: Seconds for which a program is slow: the others take a tenth of them for a block.
HELD = 0.3


@pytest.fixture
def run(monkeypatch):
    """The kernel's result through its launcher; ``stand_ins`` take the place of its functions."""

    def launched(stand_ins, kernel, clusters, size, tail, *arguments, num_warps, **constants):
        from fastswin.ops.swin_block import kernel as module

        assert kernel is module._swin_block_kernel
        assert num_warps == 4
        run_clusters(
            module, kernel.__name__, clusters, size, tail, arguments, constants, **stand_ins
        )

    def run(made, in_place=False, **stand_ins):
        monkeypatch.setattr(launch, "launch_clusters", functools.partial(launched, stand_ins))
        monkeypatch.setattr(launch, "describe", lambda t, *block: Descriptor(t, list(block)))
        x, heads, window = made["x"], made["num_heads"], made["window_size"]
        x = x.clone()
        out = x if in_place else torch.full_like(x, float("nan"))
        layers = [(made[f"{n}_weight"], made[f"{n}_bias"]) for n in ("qkv", "proj", "fc1", "fc2")]
        norms = []
        if "logit_scale" in made:
            norms = [(made[f"{n}_weight"], made[f"{n}_bias"]) for n in ("norm1", "norm2")]
        return launch.swin_block_fwd(
            x, pack_block(*layers, *norms),
            pack_bias(made["bias"], heads, window, made["shift_size"], x.device),
            pack_head_scale(made.get("logit_scale")), 32**-0.5, window, made["shift_size"], 1e-5,
            out,
        )  # fmt: skip

    return run


def check(actual, made):
    eager = swin_block(**made, impl="reference")
    oracle = swin_block(**in_double(made), impl="reference")
    assert_close_to_oracle(actual, eager, oracle, made["x"].dtype)


@pytest.mark.parametrize("shift", [(0, 0), (3, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("window", [(7, 7), (8, 8)], ids=str)
@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("version", [1, 2])
def test_block(version, heads, window, shift, run):
    made = make_block(heads=heads, version=version, windows=MAP, window=window, shift=shift)
    check(run(made), made)


@pytest.mark.parametrize("window", [(7, 7), (8, 8)], ids=str)
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("version", [1, 2])
def test_in_place(version, heads, window, run):
    """Two images; bfloat16."""
    made = make_block(
        heads=heads, version=version, batch=2, windows=ROW, window=window, dtype=torch.bfloat16
    )
    check(run(made, in_place=True), made)


@pytest.mark.parametrize("window", [(7, 8), (5, 10), (6, 10), (4, 16)], ids=str)
@pytest.mark.parametrize("version", [1, 2])
def test_windows_that_are_not_square(version, window, run):
    made = make_block(heads=4, version=version, windows=(2, 1), window=window, shift=(2, 3))
    check(run(made), made)


@pytest.mark.parametrize("version", [1, 2])
def test_the_order_in_which_stores_land_does_not_matter(version, run):
    made = make_block(heads=3, version=version, windows=ONE)
    runs = [run(made) for _ in range(8)]
    check(runs[0], made)
    assert all(torch.equal(runs[0], other) for other in runs[1:])


def test_large_offsets_do_not_cancel(run):
    made = make_block(heads=3, windows=ROW, offset=100.0)
    check(run(made), made)


def exchange(barrier):
    """Which exchange of its program a barrier counts."""
    return (barrier - me().first) // 8


def slow(number, ahead=None):
    """Waiting for bytes, but program 1 sleeps behind its exchange ``number``.

    For a while, or until the others have sent it all of their exchange ``ahead``.
    """

    def wait(barrier):
        wait_bytes(barrier)
        if exchange(barrier) != number or me().rank != 1:
            return
        if ahead is None:
            time.sleep(HELD)
            return
        deadline = time.monotonic() + PATIENCE / 2
        while not me().lacks_its_own_only(me().first + 8 * ahead):
            assert time.monotonic() < deadline, "nobody ran ahead"
            time.sleep(1e-3)

    return wait


@pytest.mark.parametrize(
    ("version", "number"), [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4)]
)
def test_others_wait_for_a_slow_program(version, number, run):
    made = make_block(heads=2, version=version, windows=ONE)
    check(run(made, in_place=True, wait_bytes=slow(number)), made)


def test_others_run_ahead_of_a_slow_program_as_far_as_they_may(run):
    """Rows behind the first half come while attention's have not been read."""
    made = make_block(heads=3, windows=ONE)
    check(run(made, wait_bytes=slow(0, ahead=1)), made)


def rejected(made, run, **stand_ins):
    with pytest.raises(AssertionError) as found:
        check(run(made, **stand_ins), made)
    return str(found.value)


@pytest.mark.parametrize("heads", [3, 4])
@pytest.mark.parametrize("version", [1, 2])
def test_sums_that_do_not_wait_are_noticed(version, heads, run):
    """Without the second cluster barrier sums fall on rows that a slow program has not read.

    Program 2's on program 1's; of two programs, the other's sums lie where rows have been read.
    """

    def first_wait_only():
        if me().cluster.arrivals[me().rank] == 1:
            cluster_wait()

    made = make_block(heads=heads, version=version, windows=ONE)
    found = rejected(made, run, cluster_wait=first_wait_only, wait_bytes=slow(1, ahead=2))
    assert "NaN" in found or "error" in found


def test_rows_in_the_place_of_others_are_noticed(run):
    """Were the second exchange's place the first's, a slow program would read the wrong rows."""
    made = make_block(heads=3, windows=ONE)
    rows = 3 * 32 * live_threads(49)
    rows2 = 128 + 3 * 2 * 512 + rows

    def send(piece, address, barrier, rank, threads):
        send_piece(piece, address - rows * (exchange(barrier) == 1), barrier, rank, threads)

    def receive(address, dtype, threads, layout):
        moved = address - rows * (address - me().first >= rows2)
        return receive_piece(moved, dtype, threads, layout)

    stand_ins = {"send_piece": send, "receive_piece": receive}
    found = rejected(made, run, **stand_ins, wait_bytes=slow(0, ahead=1))
    assert "error" in found


def test_a_barrier_that_counts_too_little_is_noticed(run, monkeypatch):
    monkeypatch.setattr(gluon_memory, "PATIENCE", 1.0)

    def expect(barrier, size):
        expect_bytes(barrier, size - 8 * 49 * (exchange(barrier) == 1))

    rejected(make_block(windows=ONE), run, expect_bytes=expect)


def test_stores_to_a_program_that_has_not_begun_are_noticed(run, monkeypatch):
    monkeypatch.setattr(gluon_memory, "PATIENCE", 1.0)

    found = rejected(
        make_block(windows=ONE), run, cluster_wait=lambda: None, expect_bytes=expect_bytes_late
    )
    assert found == "a store before its barrier is made"
