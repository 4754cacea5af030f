"""Tiles of a later step, from the generated PTX."""

from __future__ import annotations

import itertools
import types

import pytest
from gluon_threads import handed_to_assembly
from ptx_reader import TileCopy, read

from fastswin._triton import tile_copies

NAME = "_some_kernel_param_1"

#: What a launch gives: the program's first tile in memory, the first slot and barrier.
ROW, COLUMN, ADDRESS, BARRIERS = 384, 640, 1024 + 5 * 16384, 200_464


def copies(text, threads):
    """Thread, place and barrier of each tile that is asked for."""
    found = []
    for copy in read(text, threads, {1: ROW, 2: COLUMN, 3: ADDRESS, 4: BARRIERS, 5: 0, 6: 0}):
        assert isinstance(copy, TileCopy)
        assert copy.parameter == NAME
        assert copy.mask is None
        for thread in copy.live.nonzero().flatten().tolist():
            assert int(copy.row[thread]) == ROW
            at = int(copy.column[thread]), int(copy.address[thread]), int(copy.barrier[thread])
            found.append((thread, *at))
    return found


def check_again(step, slot, tiles, size, warp, warps):
    """A warp for each tile, side by side in the slot, counted at the slot's barrier."""
    text = again(NAME, tiles, size, step * tiles * 64, slot * tiles * size, 8 * slot, warp)
    expected = [
        (
            32 * (warp + tile),
            COLUMN + 64 * (step * tiles + tile),
            ADDRESS + (slot * tiles + tile) * size,
            BARRIERS + 8 * slot,
        )
        for tile in range(tiles)
    ]
    assert sorted(copies(text, 32 * warps)) == expected


def again(*of):
    return tile_copies._asking_again(*of)


@pytest.mark.parametrize("size", [2048, 8192, 16384])
@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_a_later_steps_tiles_are_asked_for_once(tiles, size):
    for (step, slot), warps in itertools.product(((2, 0), (7, 3), (23, 7)), (4, 8)):
        for warp in {0, warps - tiles}:
            check_again(step, slot, tiles, size, warp, warps)


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("one, lane, 0", "one, lane, 1"),
        ("tile, tile, 4;", "tile, tile, 3;"),
        ("one, tile, 2, one", "one, tile, 3, one"),
        ("one, tile, 2, one", "one, tile, 1, one"),
        ("setp.lt.and.u32 one", "setp.lt.and.u32 lane"),
        ("to, tile, 8192, $3", "to, tile, 4096, $3"),
        ("column, tile, 6", "column, tile, 5"),
        ("column, column, $2", "column, column, $1"),
        ("column, column, 640", "column, column, 512"),
        ("[to+32768]", "[to+16384]"),
        ("[$4+16]", "[$4+8]"),
        ("[$4+16]", "[$3+16]"),
        ("{column, $1}", "{column, $2}"),
        ("@one ", ""),
        ("cvta.param.u64 map, map; ", ""),
        (NAME, "_some_kernel_param_6"),
    ],
)
def test_a_wrong_text_of_a_later_step_would_show(text, changed, monkeypatch):
    right = tile_copies._asking_again
    assert text in right(NAME, 2, 8192, 640, 32768, 16, 4)
    check_again(5, 2, 2, 8192, 4, 8)
    monkeypatch.setattr(tile_copies, "_asking_again", lambda *of: right(*of).replace(text, changed))
    with pytest.raises((AssertionError, AttributeError)):
        check_again(5, 2, 2, 8192, 4, 8)


def test_what_is_known_beforehand_is_in_the_text():
    """``ask_again`` itself hands over where the first step begins, and nothing of the later one."""
    desc = types.SimpleNamespace(block_type=types.SimpleNamespace(nbytes=8192))
    operands = ["row", "column", "address", "barriers"]
    found = handed_to_assembly(tile_copies, "ask_again", desc, *operands, NAME, 9, 2, 4, 3)
    text = again(NAME, 4, 8192, 9 * 4 * 64, 2 * 4 * 8192, 16, 3)
    assert found == [(text, "=r," + "r," * 4 + "~{memory}", operands, False, 1)]
