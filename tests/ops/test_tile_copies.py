"""Every tile is asked for once, by one warp of one program, from the generated PTX."""

from __future__ import annotations

import itertools
import types

import pytest
from gluon_threads import handed_to_assembly
from ptx_reader import TileCopy, read

from fastswin._triton import tile_copies
from fastswin.ops.cluster_linear.config import ClusterLinearConfig

NAME = "_some_kernel_param_6"

#: What a launch gives: where the first tile begins in memory, in shared memory, its barrier.
ROW, COLUMN, ADDRESS, BARRIERS = 192, 1280, 1024 + 7 * 8192, 200_720

#: Programs that share, with the bits of those that get a tile.
SHARES = {1: None, 2: 0b1010, 3: 0b111, 4: 0x8888, 8: 0xFF00}

#: Tiles: one, few, as many as a ring has; some that warps and programs do not divide.
TILES = (1, 2, 3, 4, 7, 8, 12, 22)


def asked(tiles, per_barrier, warps, share, number=0, of=8, size=8192):
    """Copies that one program of ``of`` warps asks for, in order."""
    text = tile_copies._asking(NAME, tiles, per_barrier, size, warps, share)
    given = {1: ROW, 2: COLUMN, 3: ADDRESS, 4: BARRIERS, 5: number, 6: SHARES[share] or 0}
    return read(text, 32 * of, given)


def by_tile(copies, size=8192):
    """``(tile, thread)`` of every copy, which is what its tile says."""
    found = []
    for copy in copies:
        assert isinstance(copy, TileCopy)
        assert copy.parameter == NAME
        for thread in copy.live.nonzero().flatten().tolist():
            tile, off = divmod(int(copy.address[thread]) - ADDRESS, size)
            assert off == 0
            assert int(copy.row[thread]) == ROW
            assert int(copy.column[thread]) == COLUMN + 64 * tile
            found.append((tile, thread, int(copy.barrier[thread]), copy.mask))
    return found


def check(tiles, per_barrier, warps, share, of=8, size=8192):
    everything = []
    for number in range(share):
        found = by_tile(asked(tiles, per_barrier, warps, share, number, of, size), size)
        for tile, thread, barrier, mask in found:
            assert thread % 32 == 0, "one lane asks"
            assert thread // 32 < warps, "no other warp asks"
            assert thread // 32 == tile // share % warps, "a part of the tiles each"
            assert barrier == BARRIERS + 8 * (tile // per_barrier)
            assert (mask is None) == (share == 1)
            assert mask is None or (mask == SHARES[share]).all()
            assert tile % share == number, "every so many tiles are a program's"
        order = [tile for tile, *_ in found]
        assert order == sorted(order), "tiles come in the order of their steps"
        everything += order
    assert sorted(everything) == list(range(tiles))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("tiles", TILES)
def test_every_tile_is_asked_for_once(tiles, share):
    """By programs that have more warps than ask, or as many."""
    for per_barrier, warps, of in itertools.product((1, 2, 4), (1, 2, 4, 8), (4, 8)):
        if warps <= of:
            check(tiles, per_barrier, warps, share, of)


@pytest.mark.parametrize("size", [2048, 4096, 16384])
def test_tiles_of_other_sizes(size):
    check(7, 2, 4, 2, 4, size)


def test_warps_that_a_program_lacks_ask_for_nothing():
    """So a kernel must not count on more than it has."""
    found = [tile for tile, *_ in by_tile(asked(8, 1, 4, 1, of=2))]
    assert found == [0, 1, 4, 5]
    with pytest.raises(AssertionError):
        check(8, 1, 4, 1, of=2)


def test_products_in_clusters_have_the_warps_that_ask():
    from fastswin.ops.cluster_linear.ring import asking_warps

    for block_m, block_n, splits in itertools.product((16, 32, 64, 128), (64, 128), (1, 2)):
        warps = ClusterLinearConfig(block_m, block_n, splits, 2).warps
        assert 1 <= min(asking_warps(block_m), asking_warps(block_n))
        assert max(asking_warps(block_m), asking_warps(block_n)) <= warps


def test_operands_stand_where_the_text_says():
    """``ask_for_tiles`` itself hands them over, with a result and nothing that they become."""
    desc = types.SimpleNamespace(block_type=types.SimpleNamespace(nbytes=4096))
    operands = ["row", "column", "address", "barriers", "number", "mask"]
    found = handed_to_assembly(
        tile_copies, "ask_for_tiles", desc, *operands, NAME, 6, 2, 4, 3
    )  # fmt: skip
    text = tile_copies._asking(NAME, 6, 2, 4096, 3, 4)
    assert found == [(text, "=r," + "r," * 6 + "~{memory}", operands, False, 1)]


def test_where_shared_memory_begins():
    found = handed_to_assembly(tile_copies, "ring_address")
    assert found == [("mov.u32 $0, global_smem;", "=r", [], True, 1)]


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("one, lane, 0", "one, lane, 1"),
        ("one, tile, 4, one", "one, tile, 5, one"),
        ("one, tile, 4, one", "one, tile, 3, one"),
        ("tile, tile, 2, $5", "tile, tile, 2, $4"),
        ("tile, tile, 2, $5", "tile, tile, 1, $5"),
        ("add.u32 tile, tile, 8", "add.u32 tile, tile, 4"),
        ("live, tile, 11, one", "live, tile, 12, one"),
        ("live, tile, 11, one", "live, tile, 10, one"),
        ("to, tile, 8192, $3", "to, tile, 4096, $3"),
        ("column, tile, 6", "column, tile, 7"),
        ("column, column, $2", "column, column, $1"),
        ("{column, $1}", "{column, $2}"),
        ("counter, tile, 1", "counter, tile, 0"),
        ("counter, counter, 3", "counter, counter, 4"),
        ("counter, counter, $4", "counter, counter, $3"),
        ("mask, $6", "mask, $5"),
        (NAME, "_some_kernel_param_1"),
        ("cvta.param.u64 map, map; ", ""),
        ("@live ", ""),
        (".multicast::cluster", ""),
        (", mask;", ";"),
        (".b16 mask", ".b32 mask"),
        ("setp.lt.and.u32 live", "setp.lt.and.u32 lane"),
    ],
)
def test_a_wrong_text_would_show(text, changed, monkeypatch):
    right = tile_copies._asking
    assert text in right(NAME, 11, 2, 8192, 4, 2)
    check(11, 2, 4, 2)
    monkeypatch.setattr(tile_copies, "_asking", lambda *of: right(*of).replace(text, changed))
    with pytest.raises((AssertionError, AttributeError)):
        check(11, 2, 4, 2)


def test_what_the_reader_does_not_know_is_an_error():
    begin = "{ .reg .b32 lane; mov.u32 lane, %tid.x;"
    for line, error in {
        "mul.hi.u32 lane, lane, lane;": KeyError,
        "mov.u32 other, lane;": AssertionError,
        "mov.u32 lane, %laneid;": KeyError,
        "@lane mov.u32 lane, lane;": AssertionError,
        "cvt.u16.u32 lane, lane;": AssertionError,
    }.items():
        with pytest.raises(error):
            read(f"{begin} {line} }}", 64, {})
    assert read(f"{begin} add.u32 lane, lane, 1; }}", 64, {}) == []
