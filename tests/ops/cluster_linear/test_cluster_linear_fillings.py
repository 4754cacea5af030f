"""Every tile that the programs of a cluster ask for, the kernel's own source on a CPU.

Which, where it goes and is counted, who gets it, and on which side of the wait for the kernel in
front.
"""

from __future__ import annotations

import collections
import itertools

import pytest
import ring_threads
import torch
from cluster_linear_cases import check, make_product
from cluster_linear_threads import config_of
from gluon_clusters import me

from fastswin.ops.cluster_linear.config import ClusterLinearConfig, config_blocker
from fastswin.ops.cluster_linear.ring import WEIGHT, parameter

torch.set_num_threads(1)

#: Rows and columns of a tile, splits, channels of a step, tiles of rows and of columns that share:
#: either operand in front, splits, each share, wide steps.
FORMS = [
    (64, 64, 1, 64, 1, 1), (64, 128, 1, 64, 3, 1), (128, 64, 1, 128, 1, 2), (128, 128, 1, 64, 2, 1),
    (64, 64, 1, 256, 1, 1), (32, 64, 1, 128, 4, 2), (16, 128, 2, 64, 1, 2), (64, 128, 2, 64, 2, 2),
    (64, 64, 4, 64, 2, 1),
]  # fmt: skip

#: Of each program: so few that slots are filled twice again, and all in the longest ring.
STEPS = 6


def ring_of(form, slots):
    """Tiles with a ring of so many slots, and columns and inputs of one cluster's product."""
    block_m, block_n, splits, block_k, *shares = form
    N, K = shares[1] * block_n, STEPS * block_k * splits
    return config_of(block_m, block_n, splits, K, slots, block_k, shares), N, K


def fits(form, slots):
    config, N, K = ring_of(form, slots)
    return config_blocker(config, 1, N, K) is None


RINGS = [ring for ring in itertools.product(FORMS, range(2, STEPS + 1)) if fits(*ring)]


class Watch:
    """What a product's programs ask for, as the text says it, and when."""

    def __init__(self, monkeypatch):
        self.waited, self.asking, self.found = set(), {}, []
        self.ask_for_one = ring_threads.ask
        monkeypatch.setattr(ring_threads, "ask", self.ask)

    def wait_for_previous(self, PDL):
        self.waited.add(me().rank)

    def ask_for_tiles(self, asked, *arguments):
        when = "behind" if me().rank in self.waited else "in front"
        self.asking[me().rank] = when, arguments[7] == parameter(WEIGHT.value)
        asked(*arguments)

    def ask_again(self, asked, *arguments):
        self.asking[me().rank] = "again", arguments[5] == parameter(WEIGHT.value)
        asked(*arguments)

    def ask(self, desc, at, address, barrier, mask):
        when, of_weight = self.asking[me().rank]
        place = address - me().ring.first, sorted(me().ring.barriers).index(barrier)
        given = [me().rank] if mask is None else [r for r in range(16) if mask >> r & 1]
        self.found.append((when, me().rank, given, (of_weight, *at, *place)))
        self.ask_for_one(desc, at, address, barrier, mask)


def expected(config, early):
    """``(program, when, tile)`` of every tile that a program of the only cluster needs."""
    blocks, sizes = config.block_k // 64, (128 * config.block_m, 128 * config.block_n)
    behind = config.slots * blocks * max(sizes)  # where the smaller operand's tiles begin
    begins = (behind, 0) if config.block_n > config.block_m else (0, behind)
    places = itertools.product(
        range(config.share_columns), range(config.share_rows), range(config.splits)
    )
    for rank, (across, down, part) in enumerate(places):
        for of_weight, number in itertools.product((False, True), range(STEPS * blocks)):
            step, block = divmod(number, blocks)
            in_front = "in front" if of_weight and step < early else "behind"
            row = across * config.block_n if of_weight else down * config.block_m
            slot = step % config.slots
            to = begins[of_weight] + (slot * blocks + block) * sizes[of_weight]
            tile = of_weight, row, 64 * (part * STEPS * blocks + number), to, slot
            yield rank, in_front if step < config.slots else "again", tile


def watched(form, slots, run, monkeypatch):
    """The tiles, and what was asked for, by when, asker, those who get it."""
    config, N, K = ring_of(form, slots)
    made = make_product(config.share_rows * config.block_m - 7, N, K)
    watch = Watch(monkeypatch)
    stand_ins = "wait_for_previous", "ask_for_tiles", "ask_again"
    check(run(made, config, **{name: getattr(watch, name) for name in stand_ins}), made)
    return config, watch.found


@pytest.mark.parametrize(("form", "slots"), RINGS, ids=str)
def test_every_tile_is_asked_for_once_in_its_turn(form, slots, run, monkeypatch):
    """In front of the wait the weight's tiles of the early steps and none of x; then all others."""
    config, found = watched(form, slots, run, monkeypatch)
    early = slots if slots == STEPS else slots - slots // 2
    come = [(rank, when, tile) for when, _, given, tile in found for rank in given]
    assert collections.Counter(come) == collections.Counter(expected(config, early))
    first = [(asker, given, tile[:3]) for when, asker, given, tile in found if when != "again"]
    assert {len(given) for _, given, tile in first if tile[0]} == {config.share_rows}
    assert {len(given) for _, given, tile in first if not tile[0]} == {config.share_columns}
    tiles = [tile for *_, tile in first]
    assert len(tiles) == len(set(tiles)), "a tile that two programs ask for"
    assert {asker for asker, *_ in first} == set(range(config.programs(N=0, post_norm=False)))
    assert all(given == [asker] for when, asker, given, _ in found if when == "again")


def test_tiles_of_one_slot_are_asked_for_behind_those_of_the_slot_before(run, monkeypatch):
    """x's come in the order of the steps, and so do the weight's, on each side of the wait."""
    for slots in (3, 5):
        _, found = watched(FORMS[0], slots, run, monkeypatch)
        for when, of_weight in itertools.product(("in front", "behind", "again"), (False, True)):
            columns = [tile[2] for at, *_, tile in found if (at, tile[0]) == (when, of_weight)]
            assert columns == sorted(columns)


def test_programs_have_a_warp_for_each_tile_of_a_later_step():
    """And two for the late half of the weight."""
    for block_m, block_n, splits, block_k in itertools.product(
        (16, 32, 64, 128), (64, 128), (1, 2, 4, 8), (64, 128, 256)
    ):
        warps = ClusterLinearConfig(block_m, block_n, splits, 2, block_k).warps
        assert max(2, block_k // 64) <= warps
