"""Every sum of a narrow tile arrives where its receiver's layout gives its place to.

As test_cluster_linear_exchange.py, of products that lie the other way round.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from exchange_ptx import (
    BARRIER,
    EMPTY,
    SUMS,
    counted,
    filled,
    narrow_places,
    received_narrow,
    sent_narrow,
    taken_up,
    turned_places,
)

from fastswin.ops.cluster_linear import narrow_exchange
from fastswin.ops.cluster_linear.config import ClusterLinearConfig, config_blocker

#: Rows and columns of a tile, programs that share it: 8 rows or more each.
TILES = [tile for tile in itertools.product((16, 32), (64, 128), (2, 4)) if tile[0] // tile[2] >= 8]


@pytest.fixture(params=TILES, ids=str)
def tile(request):
    return request.param


def piece_bytes(block_m, block_n, splits):
    """What one program sends to another."""
    return block_m // splits * block_n * 4


def sent_by(tile, part, first=0):
    """Stores of one of the tile's programs, numbers ``first`` and on of their cluster."""
    return sent_narrow(*tile, SUMS + part * piece_bytes(*tile), BARRIER, first + part)


def memory_of(tile, part, first=0):
    """What ``part`` has left with each program."""
    block_m, block_n, splits = tile
    row, column = turned_places(block_m, block_n)
    place = row * block_n + column
    return filled(sent_by(tile, part, first), place, splits, block_m * block_n, first + part, first)


def check_arrivals(tile, first=0):
    """What each program takes up of each is the sum of the row and column that it adds it to."""
    block_m, block_n, splits = tile
    row, column = narrow_places(*tile)
    for part, program in itertools.product(range(splits), range(splits)):
        loads = received_narrow(*tile, SUMS + part * piece_bytes(*tile))
        found = taken_up(loads, memory_of(tile, part, first)[program], row.shape[1])
        expected = (program * (block_m // splits) + row) * block_n + column
        assert torch.equal(found, expected)


def check_counts(tile, first=0):
    """What each program sends counts at the others, what it keeps nowhere."""
    splits, piece = tile[2], piece_bytes(*tile)
    for part in range(splits):
        found = counted(sent_by(tile, part, first), splits, first)
        assert found == [0 if program == part else piece for program in range(splits)]


def test_these_are_all_cuts_of_narrow_tiles():
    able = [
        tile for tile in itertools.product((16, 32), (64, 128), (2, 4, 8))
        if config_blocker(ClusterLinearConfig(*tile, 2), 49, 128, 2048) is None
    ]  # fmt: skip
    assert able == TILES


def check_exchange(tile):
    check_counts(tile)
    check_arrivals(tile)


@pytest.mark.parametrize("places", [turned_places, narrow_places])
def test_layouts_hold_each_place_once(places, tile):
    block_m, block_n, splits = tile
    row, column = places(*tile[: 2 if places is turned_places else 3])
    rows = block_m if places is turned_places else block_m // splits
    assert sorted((row * block_n + column).flatten().tolist()) == list(range(rows * block_n))


@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("rows", [8, 16, 32])
def test_threads_finish_rows_alone_and_store_16_bytes_where_they_have_them(rows, block_n):
    """No two have the same value, a warp's threads for one row lie side by side."""
    layout = narrow_exchange.narrow_layout(rows, block_n)
    assert list(layout.order) == [1, 0]
    ends = zip(layout.size_per_thread, layout.threads_per_warp, layout.warps_per_cta, strict=True)
    covered = [values * threads * warps for values, threads, warps in ends]
    assert covered[1] == block_n
    assert rows % covered[0] == 0
    assert layout.threads_per_warp[0] * layout.threads_per_warp[1] == 32
    assert layout.warps_per_cta[0] * layout.warps_per_cta[1] == block_n // 16
    assert layout.size_per_thread[1] * 2 == (8 if rows == 8 else 16)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_each_sum_arrives_where_its_place_is_added(number, tile):
    """Also of further tiles of a cluster that holds several (16 programs at most)."""
    check_arrivals(tile, number * tile[2])


@pytest.mark.parametrize("number", [0, 3])
def test_pieces_lie_side_by_side_and_fill_the_barriers_count(number, tile):
    """A piece for each program, all within the tail; a program's own counts nowhere."""
    splits, piece = tile[2], piece_bytes(*tile)
    for part in range(splits):
        found = memory_of(tile, part, number * splits) != EMPTY
        found = found.view(splits, splits, piece // 4)
        assert found[:, part].all()
        assert found.sum() == splits * (piece // 4)
    check_counts(tile, number * splits)


def test_inline_assembly_sees_all_values_of_a_thread_at_once(tile):
    """``pack`` of send_narrow and receive_narrow, half the rows that they have."""
    block_m, _, splits = tile
    assert turned_places(*tile[:2])[0].shape[1] == block_m // 2
    assert narrow_places(*tile)[0].shape[1] == block_m // splits // 2


@pytest.mark.parametrize("bases", ["reg_bases", "lane_bases", "warp_bases"])
def test_a_wrong_layout_would_show(bases, tile, monkeypatch):
    """Were registers, lanes or warps in each other's places, the proof above would notice."""
    right = narrow_exchange._received_layout

    def swapped(*shape):
        layout = right(*shape)
        parts = {name: getattr(layout, name) for name in
                 ("reg_bases", "lane_bases", "warp_bases", "block_bases")}  # fmt: skip
        first, second, *others = parts[bases]
        parts[bases] = [second, first, *others]
        return type(layout)(*parts.values(), layout.shape)

    monkeypatch.setattr(narrow_exchange, "_received_layout", swapped)
    with pytest.raises(AssertionError):
        check_arrivals(tile)


#: Of what is sent: a store that lies elsewhere, two registers exchanged, another program, another
#: barrier, a shorter way from warp to warp or from lane to lane; a program's own sums elsewhere, or
#: taken for others'. The same of what is taken up.
MISTAKES = {
    "place": ("_sending", "[to+512]", "[to+528]"),
    "registers": ("_sending", "{$4, $5,", "{$5, $4,"),
    "program": ("_sending", "add.u32 rank, rank, 1", "add.u32 rank, rank, 0"),
    "barrier": ("_sending", "counter, $36, rank", "counter, $20, rank"),
    "warps": ("_sending", "below, below, 1024, to", "below, below, 512, to"),
    "lanes": ("_sending", "shl.b32 to, below, 4", "shl.b32 to, below, 3"),
    "own place": ("_sending", "[below+512]", "[below+528]"),
    "own sums sent": ("_sending", "@!own st.async", "st.async"),
    "others' sums kept": ("_sending", "@own st.shared", "st.shared"),
    "own and others'": ("_sending", "own, rank, here", "own, rank, below"),
    "of all tiles": ("_sending", "rank, here, 254", "rank, here, 255"),
    "place read": ("_receiving", "[from+512]", "[from+0]"),
    "registers read": ("_receiving", "{$4, $5,", "{$5, $4,"),
    "warps read": ("_receiving", "from, warp, 1024, from", "from, warp, 512, from"),
    "lanes read": ("_receiving", "shl.b32 from, warp, 4", "shl.b32 from, warp, 5"),
}


@pytest.mark.parametrize(("name", "text", "changed"), MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_text_would_show(name, text, changed, monkeypatch):
    right = getattr(narrow_exchange, name)
    assert text in right(*((32, 2) if name == "_sending" else (16,)))
    monkeypatch.setattr(narrow_exchange, name, lambda *sizes: right(*sizes).replace(text, changed))
    with pytest.raises((AssertionError, IndexError)):
        check_exchange((32, 64, 2))
