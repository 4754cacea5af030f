"""Tiles that programs of a cluster share, the kernel's own source with programs as threads.

What a program needs others ask for too: results, and that mistakes show, whoever shares.
"""

from __future__ import annotations

import re
import time

import gluon_clusters
import pytest
import ring_threads
import torch
from cluster_linear_cases import (
    check,
    check_post_norm,
    check_stream,
    make_post_norm,
    make_product,
)
from cluster_linear_threads import config_of, until_the_first_has_ended
from gluon_clusters import me
from gluon_memory import PATIENCE

from fastswin.ops.cluster_linear.config import ClusterLinearConfig, ring_slots

torch.set_num_threads(1)

#: Rows and columns of a tile, splits, channels of a step, tiles of rows and of columns that share:
#: each share alone and combined, with splits, in both orders, wide and narrow steps; 16 programs.
SHARES = [
    (64, 64, 1, 64, 2, 1), (64, 64, 1, 64, 1, 2), (64, 64, 1, 64, 2, 2), (64, 64, 1, 64, 4, 4),
    (64, 64, 1, 64, 3, 2), (64, 128, 1, 64, 2, 4), (64, 128, 4, 64, 2, 1), (64, 128, 2, 64, 2, 2),
    (64, 64, 2, 128, 1, 4), (64, 64, 8, 64, 2, 1), (128, 64, 1, 128, 1, 2), (128, 64, 4, 64, 2, 2),
    (128, 128, 1, 64, 4, 1), (128, 128, 2, 64, 2, 2), (32, 64, 1, 64, 4, 2), (32, 64, 2, 128, 2, 2),
    (16, 128, 1, 256, 2, 1), (16, 64, 2, 64, 1, 4),
]  # fmt: skip

SHORT = [(64, 64, 1, 64, 2, 2), (64, 128, 2, 64, 2, 1), (32, 64, 1, 128, 1, 4)]

WRONG = [(64, 64, 1, 64, 2, 1), (64, 64, 1, 64, 1, 2), (64, 64, 2, 64, 2, 2)]

#: What is said of tiles that do not come, and of those that come twice.
LATE = "hangs|tiles that nobody has waited for|a tile for a program that has ended"


def problem(form, steps, slots=None, M=None, clusters=1, **more):
    """A product of so many steps a program and tiles of columns, with rows of no whole tile."""
    block_m, block_n, splits, block_k, *shares = form
    K = steps * block_k * splits
    M = (shares[0] + 1) * block_m - 11 if M is None else M
    made = make_product(M, clusters * shares[1] * block_n, K, **more)
    return made, config_of(block_m, block_n, splits, K, slots, block_k, shares)


def check_product(run, made, config):
    check(run(made, config), made)


@pytest.mark.parametrize("form", SHARES, ids=str)
def test_product(form, run):
    """Rows that end within a cluster, whose last tiles have none; two clusters of columns."""
    dtype = torch.bfloat16 if SHARES.index(form) % 2 else torch.float16
    check_product(run, *problem(form, 3, clusters=2, dtype=dtype, gelu=form[4] == 2))


@pytest.mark.parametrize("M", [1, 64, 65, 128, 129, 256])
@pytest.mark.parametrize("form", [(64, 64, 1, 64, 4, 1), (64, 64, 2, 64, 2, 2)], ids=str)
def test_rows_of_any_number_of_tiles(form, M, run):
    check_product(run, *problem(form, 2, M=M, parts=2))


@pytest.mark.parametrize("form", SHARES[1::4], ids=str)
def test_onto_the_residual_in_place_with_statistics(form, run):
    made, config = problem(form, 2, clusters=2)
    check_stream(run, len(made["x"]), *made["weight"].shape, config)


@pytest.mark.parametrize("steps", [3, 5])
@pytest.mark.parametrize("form", SHORT, ids=str)
def test_a_ring_shorter_than_the_steps(form, steps, run):
    """What comes later a program asks for itself, at its own time."""
    check_product(run, *problem(form, steps, 2, residual=True))


@pytest.mark.parametrize("slots", [2, None])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("block_m", "columns"), [(64, 4), (64, 3), (128, 2)], ids=str)
def test_post_norm_of_rows_that_all_tiles_share(block_m, columns, splits, slots, run):
    N, K = 64 * columns, 64 * 4 * splits
    if slots is None:
        slots = ring_slots(block_m, 64, splits, K, N, post_norm=True)
    config = ClusterLinearConfig(block_m, 64, splits, slots, 64, 1, columns)
    made = make_post_norm(block_m + 5, N, K)
    check_post_norm(run(made, config, in_place=slots == 2), made)


def test_a_slow_program_holds_up_those_that_share_and_no_more(run):
    def ask(asked, *arguments):
        if me().rank == 1:
            time.sleep(0.05)
        asked(*arguments)

    made, config = problem((64, 64, 1, 64, 2, 2), 4)
    runs = [run(made, config), run(made, config, ask_for_tiles=ask)]
    check(runs[0], made)
    assert torch.equal(*runs)


def rejected(made, config, run, monkeypatch, **stand_ins):
    monkeypatch.setattr("gluon_memory.PATIENCE", 0.3)
    with pytest.raises(AssertionError) as found:
        check(run(made, config, **stand_ins), made)
    return str(found.value)


def change(**changes):
    """``ask_for_tiles`` with some of its arguments changed where tiles are shared."""
    names = ("desc", "row", "column", "address", "barriers", "number", "mask", "parameter",
             "tiles", "per_barrier", "share", "warps")  # fmt: skip

    def ask(asked, *arguments):
        given = dict(zip(names, arguments, strict=True))
        if given["share"] > 1:
            given |= {name: changed(given) for name, changed in changes.items()}
        asked(*given.values())

    return ask


@pytest.mark.parametrize("form", WRONG, ids=str)
@pytest.mark.parametrize("mistake", ["own", "all", "lower", "higher", "none"])
def test_a_wrong_mask_is_noticed(mistake, form, run, monkeypatch):
    """A tile for its asker alone, for programs that need another one, or for none."""
    made, config = problem(form, 2)
    everyone = (1 << config.programs(0, False)) - 1
    found = {
        "own": lambda given: 1 << me().rank,
        "all": lambda given: everyone if everyone != given["mask"] else 2 * everyone,
        "lower": lambda given: int(given["mask"]) & (int(given["mask"]) - 1),
        "higher": lambda given: given["mask"] << 1,
        "none": lambda given: 0,
    }[mistake]
    rejected(made, config, run, monkeypatch, ask_for_tiles=change(mask=found))


@pytest.mark.parametrize("form", WRONG, ids=str)
@pytest.mark.parametrize("mistake", ["first", "next", "over"])
def test_a_wrong_number_is_noticed(mistake, form, run, monkeypatch):
    """All ask for the same part; a program for another's; for none that there is first."""
    found = {
        "first": lambda given: 0,
        "next": lambda given: given["number"] + int(me().rank == 0),
        "over": lambda given: given["number"] + 1,
    }[mistake]
    made, config = problem(form, 2)
    rejected(made, config, run, monkeypatch, ask_for_tiles=change(number=found))


def test_asking_before_the_others_have_made_their_barriers_is_noticed(run, monkeypatch):
    """Without the cluster's barrier, of a program that begins late."""

    def late(*arguments):
        deadline = time.monotonic() + PATIENCE / 2
        while me().rank == 1 and not me().cluster.failures and time.monotonic() < deadline:
            time.sleep(1e-3)
        ring_threads.expect_bytes_of_each(*arguments)

    def go_on():
        me().cluster.pass_by()
        me().apart = False

    for form in WRONG:
        found = rejected(
            *problem(form, 2), run, monkeypatch, cluster_wait=go_on, expect_bytes_of_each=late
        )
        assert found == "a tile before its barrier is made"


@pytest.mark.parametrize("form", [(64, 64, 1, 64, 1, 1), *WRONG], ids=str)
def test_asking_before_a_programs_own_warps_have_met_is_noticed(form, run, monkeypatch):
    """Of barriers that another warp makes, or of a slot that another warp still reads."""
    monkeypatch.setattr(ring_threads, "debug_barrier", lambda: None)
    found = rejected(*problem(form, 4, 2), run, monkeypatch)
    assert found == "asked for before all warps know what the others have done"


def test_a_tile_for_a_program_that_has_ended_is_noticed(run, monkeypatch):
    """Which has not waited for its tiles."""

    def ask(asked, *arguments):
        if me().rank == 1:
            until_the_first_has_ended()
        asked(*arguments)

    def wait(barrier, parity):
        if me().rank != 0:
            ring_threads.wait_arrivals(barrier, parity)

    def end(program):
        program.land()
        program.ended = True

    made, config = problem((64, 64, 1, 64, 2, 1), 2)
    monkeypatch.setattr(gluon_clusters.Program, "end", end)
    found = rejected(made, config, run, monkeypatch, ask_for_tiles=ask, wait_arrivals=wait)
    assert found == "a tile for a program that has ended"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"address": lambda given: given["address"] + 8 * 8192}, "a tile over the ring's end"),
        ({"address": lambda given: given["address"] - 4 * 8192}, "a tile over the ring's end"),
        ({"address": lambda given: given["address"] + 512}, "a tile that lies askew"),
        ({"barriers": lambda given: given["barriers"] - 8}, "a tile before its barrier is made"),
        ({"mask": lambda given: given["mask"] << 2}, "a tile for programs that the cluster lacks"),
        ({"column": lambda given: given["column"] + 64}, "error"),
        ({"row": lambda given: given["row"] + 1}, "error"),
        ({"per_barrier": lambda given: 2}, LATE),
    ],
    ids=["behind", "in front", "askew", "barrier", "mask", "column", "row", "per barrier"],
)  # fmt: skip
def test_tiles_elsewhere_are_noticed(changed, message, run, monkeypatch):
    made, config = problem((64, 64, 1, 64, 2, 1), 2)
    found = rejected(made, config, run, monkeypatch, ask_for_tiles=change(**changed))
    assert re.search(message, found)


@pytest.mark.parametrize(
    ("text", "changed", "message"),
    [("tile, tile, 2, $5", "tile, tile, 1, $5", LATE), ("[counter]", "[to]", "barrier is made"),
     ("tile, 2, one", "tile, 1, one", LATE), ("column, tile, 6", "column, tile, 5", "error")],
)  # fmt: skip
def test_a_wrong_text_is_noticed(text, changed, message, run, monkeypatch):
    from fastswin._triton.tile_copies import _asking

    def asking(*sizes):
        return _asking.fn(*sizes).replace(text, changed)

    assert text in _asking.fn("x_param_1", 2, 1, 8192, 4, 2)
    made, config = problem((64, 64, 1, 64, 2, 1), 2)
    assert re.search(message, rejected(made, config, run, monkeypatch, _asking=asking))


def test_a_descriptor_by_another_name_is_noticed(run, monkeypatch):
    """x's tiles for the weight's."""
    ask = change(parameter=lambda given: "_cluster_linear_kernel_param_1")
    made, config = problem((64, 64, 1, 64, 2, 1), 2)
    assert "error" in rejected(made, config, run, monkeypatch, ask_for_tiles=ask)
