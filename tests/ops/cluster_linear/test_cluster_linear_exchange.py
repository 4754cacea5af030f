"""Every sum arrives at the thread and register that its receiver's layout gives its place to."""

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
    received,
    rows_places,
    sent,
    taken_up,
    tile_places,
)

from fastswin._triton.gluon_tiles import accumulator
from fastswin.ops.cluster_linear import exchange

#: Rows and columns of a tile, programs that share it.
TILES = list(itertools.product((64, 128), (64, 128), (2, 4, 8)))


@pytest.fixture(params=TILES, ids=str)
def tile(request):
    return request.param


def piece_bytes(block_m, block_n, splits):
    """What one program sends to another."""
    return block_m // splits * block_n * 4


def sent_by(tile, part, first=0):
    """Stores of one of the tile's programs, numbers ``first`` and on of their cluster."""
    return sent(*tile, SUMS + part * piece_bytes(*tile), BARRIER, first + part)


def memory_of(tile, part, first=0):
    """What ``part`` has sent; the tile's programs are numbers ``first`` and on of their cluster."""
    block_m, block_n, splits = tile
    row, column = tile_places(block_m, block_n)
    place = row * block_n + column
    return filled(sent_by(tile, part, first), place, splits, block_m * block_n, first + part, first)


def check_arrivals(tile, first=0):
    """What each program takes up of each is the sum of the row and column that it adds it to."""
    block_m, block_n, splits = tile
    row, column = rows_places(*tile)
    for part, program in itertools.product(range(splits), range(splits)):
        loads = received(*tile, SUMS + part * piece_bytes(*tile))
        found = taken_up(loads, memory_of(tile, part, first)[program], row.shape[1])
        expected = (program * (block_m // splits) + row) * block_n + column
        assert torch.equal(found, expected)


def check_counts(tile, first=0):
    """What each program sends counts at the others, what it keeps nowhere."""
    splits, piece = tile[2], piece_bytes(*tile)
    for part in range(splits):
        found = counted(sent_by(tile, part, first), splits, first)
        assert found == [0 if program == part else piece for program in range(splits)]


def check_exchange(tile):
    check_counts(tile)
    check_arrivals(tile)


@pytest.mark.parametrize("places", [tile_places, rows_places])
def test_layouts_hold_each_place_once(places, tile):
    block_m, block_n, splits = tile
    row, column = places(*tile[: 2 if places is tile_places else 3])
    rows = block_m if places is tile_places else block_m // splits
    assert sorted((row * block_n + column).flatten().tolist()) == list(range(rows * block_n))


def test_alone_a_program_adds_the_tile_as_it_lies():
    for tile in itertools.product((64, 128), (64, 128)):
        assert exchange.rows_layout(*tile, 1) == accumulator(tile[1], tile[0])


@pytest.mark.parametrize("number", [0, 1])
def test_each_sum_arrives_where_its_place_is_added(number, tile):
    """Also of the second tile of a cluster that holds two (16 programs at most)."""
    check_arrivals(tile, number * tile[2])


@pytest.mark.parametrize("number", [0, 1])
def test_pieces_lie_side_by_side_and_fill_the_barriers_count(number, tile):
    """A piece for each program, all within the tail; a program's own counts nowhere."""
    splits, piece = tile[2], piece_bytes(*tile)
    for part in range(splits):
        filled = memory_of(tile, part, number * splits) != EMPTY
        filled = filled.view(splits, splits, piece // 4)
        assert filled[:, part].all()
        assert filled.sum() == splits * (piece // 4)
    check_counts(tile, number * splits)


def test_constraints_name_the_operands_of_a_thread(tile):
    """Packed so that inline assembly sees all values of a thread at once, never some of them."""
    block_m, block_n, splits = tile
    values = block_n // 2
    assert tile_places(block_m, block_n)[0].shape[1] == values
    assert rows_places(*tile)[0].shape[1] == values // splits
    named = exchange.constraints(block_n // 8, 3 * values).split(",")
    assert named == ["=r"] * (block_n // 8) + ["r"] * 3 * values + ["~{memory}"]


def test_a_wrong_layout_would_show(tile, monkeypatch):
    """Were pairs of columns in the lanes of others, the proof above would notice."""
    right = exchange.rows_layout

    def swapped(*tile):
        layout = right(*tile)
        first, second, *others = layout.lane_bases
        return type(layout)(
            layout.reg_bases, [second, first, *others], layout.warp_bases, layout.block_bases,
            layout.shape,
        )  # fmt: skip

    monkeypatch.setattr(exchange, "rows_layout", swapped)
    with pytest.raises(AssertionError):
        check_arrivals(tile)


@pytest.mark.parametrize(
    ("text", "changed"),
    [("[to+512]", "[to+528]"), ("{$40, $41,", "{$41, $40,"), ("[below+512]", "[below+528]"),
     ("@!own st.async", "st.async"), ("@own st.shared", "st.shared"), ("@own st", "@!own st"),
     ("own, warp, rank", "own, warp, tile"), ("warp, warp, tile", "warp, warp, rank")],
)  # fmt: skip
def test_a_wrong_text_would_show(text, changed, monkeypatch):
    """A store that lies elsewhere, two registers exchanged; own sums sent, or others' kept."""
    right = exchange._sending
    tile = 64, 128, 4
    assert text in right(*tile)
    monkeypatch.setattr(exchange, "_sending", lambda *tile: right(*tile).replace(text, changed))
    with pytest.raises((AssertionError, IndexError)):
        check_exchange(tile)
