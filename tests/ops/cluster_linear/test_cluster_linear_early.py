"""Rings that are filled again: whose tiles come first, later steps, the kernel's own source.

Of such a ring half of the weight is asked for in front of the wait for the kernel in front, the
other half behind x.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch
from cluster_linear_cases import check, check_post_norm, make_post_norm, make_product
from cluster_linear_threads import config_of
from gluon_clusters import me

from fastswin.ops.cluster_linear.config import MAX_SHARED_BYTES, ClusterLinearConfig
from fastswin.ops.cluster_linear.ring import WEIGHT, X, parameter

torch.set_num_threads(1)

#: Rows and columns of a tile, splits, channels of a step, tiles of rows and of columns that share.
FORMS = [
    (64, 64, 1, 64, 1, 1), (64, 128, 1, 64, 1, 1), (128, 128, 1, 64, 1, 1), (64, 64, 1, 128, 1, 1),
    (64, 64, 1, 256, 1, 1), (32, 64, 1, 128, 1, 1), (16, 128, 1, 64, 1, 1), (64, 128, 2, 64, 1, 1),
    (64, 64, 4, 64, 1, 1), (64, 128, 1, 64, 3, 1), (64, 64, 1, 64, 2, 2), (64, 128, 2, 64, 2, 1),
    (32, 64, 2, 64, 1, 2),
]  # fmt: skip


def problem(form, steps, slots, **more):
    block_m, block_n, splits, block_k, *shares = form
    K = steps * block_k * splits
    made = make_product(shares[0] * block_m - 7, shares[1] * block_n, K, **more)
    return made, config_of(block_m, block_n, splits, K, slots, block_k, shares)


#: Forms with slots of their rings: of the widest steps three fit.
RINGS = [
    (form, slots)
    for form, slots in itertools.product(FORMS, (2, 3, 4, 5))
    if ClusterLinearConfig(*form[:3], slots, *form[3:]).shared_bytes() <= MAX_SHARED_BYTES
]

#: What is said of tiles that do not come, and of those that come twice.
LOST = "hangs|tiles that nobody has waited for|a tile for a program that has ended"


@pytest.mark.parametrize("slots", range(1, 29))
def test_half_is_early_where_slots_are_filled_again(slots):
    config = ClusterLinearConfig(64, 64, 1, slots)
    assert config.early(64 * slots) == slots
    if slots > 1:
        for steps in (slots + 1, 3 * slots):
            assert config.early(64 * steps) == slots - slots // 2
            split = dataclasses.replace(config, splits=2, block_k=128)
            assert split.early(256 * steps) == slots - slots // 2
            assert 1 <= split.early(256 * steps) < slots


@pytest.mark.parametrize(("form", "slots"), RINGS, ids=str)
def test_products_of_short_rings(form, slots, run):
    """Of six to nine steps: the shortest ring's slots are filled twice again, some of the longest's
    once."""
    dtype = torch.bfloat16 if FORMS.index(form) % 2 else torch.float16
    made, config = problem(form, slots + 4, slots, dtype=dtype, gelu=slots == 3)
    check(run(made, config), made)


@pytest.mark.parametrize("slots", [2, 4])
def test_post_norm_and_statistics_of_short_rings(slots, run):
    made = make_post_norm(69, 128, 64 * 6)
    check_post_norm(run(made, ClusterLinearConfig(64, 64, 1, slots, 64, 1, 2)), made)
    made, config = problem((128, 128, 1, 64, 1, 1), 6, slots, parts=3, gelu=True)
    check(run(made, config), made)


class Order:
    """What programs ask for in front of their wait for the kernel in front, and behind it."""

    def __init__(self):
        self.waited, self.early, self.late = set(), [], []

    def wait_for_previous(self, PDL):
        self.waited.add(me().number)

    def ask_for_tiles(self, asked, desc, row, column, address, *more):
        place, tiles = more[3], more[4]
        found = self.late if me().number in self.waited else self.early
        found.append((me().number, place, int(column) // 64, tiles))
        asked(desc, row, column, address, *more)


@pytest.mark.parametrize(("slots", "early"), [(2, 1), (3, 2), (4, 2), (5, 3), (6, 6)])
@pytest.mark.parametrize("form", [FORMS[1], FORMS[3], FORMS[5]], ids=str)
def test_what_is_asked_for_in_front_of_the_wait(form, slots, early, run):
    """The first steps' part of the weight, nothing of x, which nobody may have written yet."""
    made, config = problem(form, 6, slots)
    order = Order()
    check(
        run(made, config, wait_for_previous=order.wait_for_previous,
            ask_for_tiles=order.ask_for_tiles), made,
    )  # fmt: skip
    blocks, weight, x = config.block_k // 64, parameter(WEIGHT.value), parameter(X.value)
    assert order.early == [(0, weight, 0, early * blocks)]
    behind = [(0, weight, early * blocks, (slots - early) * blocks)] if early < slots else []
    assert order.late == [(0, x, 0, slots * blocks), *behind]


def late(desc, row, column, address, barriers, number, mask, parameter_name, *more):
    """Whether the weight is asked for from the third step on."""
    return parameter_name == parameter(WEIGHT.value) and int(column) % 320 == 128


def rejected(made, config, run, monkeypatch, **stand_ins):
    monkeypatch.setattr("gluon_memory.PATIENCE", 0.3)
    with pytest.raises(AssertionError) as found:
        check(run(made, config, **stand_ins), made)
    return str(found.value)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[7], FORMS[9]], ids=str)
def test_a_late_half_that_nobody_asks_for_is_noticed(form, run, monkeypatch):
    def ask(asked, *arguments):
        if not late(*arguments):
            asked(*arguments)

    assert "hangs" in rejected(*problem(form, 5, 4), run, monkeypatch, ask_for_tiles=ask)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[7], FORMS[9]], ids=str)
def test_a_late_half_that_is_the_early_one_again_is_noticed(form, run, monkeypatch):
    def ask(asked, desc, row, column, *more):
        asked(desc, row, column - 128 * late(desc, row, column, *more), *more)

    assert "error" in rejected(*problem(form, 5, 4), run, monkeypatch, ask_for_tiles=ask)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[7], FORMS[9]], ids=str)
def test_a_late_half_that_is_asked_for_twice_is_noticed(form, run, monkeypatch):
    def ask(asked, *arguments):
        for _ in range(1 + late(*arguments)):
            asked(*arguments)

    found = rejected(*problem(form, 5, 4), run, monkeypatch, ask_for_tiles=ask)
    assert re.search(LOST, found)


@pytest.mark.parametrize("operand", [X, WEIGHT], ids=["x", "weight"])
@pytest.mark.parametrize(
    ("place", "off", "message"),
    [("step", 1, "error"), ("step", -1, "error"), ("slot", 1, "error|" + LOST),
     ("address", 1, "error"), ("barrier", 1, LOST)],
)  # fmt: skip
def test_a_later_filling_in_the_wrong_place_is_noticed(
    place, off, message, operand, run, monkeypatch
):
    """Columns of another step, another slot, its memory alone, its barrier alone."""

    def ask(asked, desc, row, column, address, barriers, name, step, slot, tiles, warp):
        if name == parameter(operand.value):
            other = (slot + off) % 3
            address += (place == "address") * (other - slot) * tiles * desc.block_type.nbytes
            barriers += (place == "barrier") * (other - slot) * 8
            step, slot = step + off * (place == "step"), other if place == "slot" else slot
        asked(desc, row, column, address, barriers, name, step, slot, tiles, warp)

    made, config = problem((64, 64, 1, 64, 1, 1), 7, 3)
    assert re.search(message, rejected(made, config, run, monkeypatch, ask_again=ask))


def test_a_later_filling_before_the_slot_is_read_is_noticed(run, monkeypatch):
    """The next step's slot, whose products are under way."""

    def ask(asked, desc, row, column, address, barriers, name, step, slot, *more):
        asked(desc, row, column, address, barriers, name, step, slot, *more)
        me().land()

    made, config = problem((64, 64, 1, 64, 1, 1), 6, 3)
    check(run(made, config, ask_again=ask), made)
    from gluon_threads import _wait_products

    def wait(outstanding, deps):
        return deps[0] if outstanding else _wait_products(outstanding, deps)

    found = rejected(made, config, run, monkeypatch, ask_again=ask, warpgroup_mma_wait=wait)
    assert "error" in found
