"""Tiles by the tensor copy engine, asked for by several warps of a program, shared by a cluster.

A warp needs 75 ns to ask for a copy, the compiler's own copies all stand in line at one warp and
synchronise the program each time (docs/performance.md). Here each of several warps asks for its
part of the tiles. With SHARE programs of a cluster that need the same tiles each asks for its part
for all of them: a multiprocessor takes 106 bytes/ns so where it takes 68 of its own (H200).

Barriers and tiles are addresses of shared memory, equal in all programs (cluster_memory.py). A
kernel that has one buffer only, the ring of tiles, has it where its shared memory begins
(:func:`ring_address`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def ring_address():
    """Where a program's shared memory begins, and with it the only buffer of a kernel.

    ``global_smem`` is Triton's name for the memory that a launch sizes.
    """
    return gl.inline_asm_elementwise(
        "mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _asking(PARAMETER, TILES, PER_BARRIER, BYTES, WARPS, SHARE):
    """PTX that asks for a program's part of the tiles, each by lane 0 of a warp."""
    by_all = ".multicast::cluster" if SHARE > 1 else ""
    copy = f"cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes{by_all}"
    text = (
        "{ .reg .pred one, live; .reg .b32 lane, tile, to, column, counter; .reg .b64 map;"
        " .reg .b16 mask; mov.u32 lane, %tid.x; shr.u32 tile, lane, 5; and.b32 lane, lane, 31;"
        f" setp.eq.u32 one, lane, 0; setp.lt.and.u32 one, tile, {WARPS}, one;"
        f" mov.b64 map, {PARAMETER}; cvta.param.u64 map, map;"
    )
    if SHARE > 1:
        text += f" mad.lo.u32 tile, tile, {SHARE}, $5; cvt.u16.u32 mask, $6;"
    shift = PER_BARRIER.bit_length() - 1
    for _ in range(-(-TILES // (WARPS * SHARE))):
        text += (
            f" setp.lt.and.u32 live, tile, {TILES}, one; mad.lo.u32 to, tile, {BYTES}, $3;"
            " shl.b32 column, tile, 6; add.u32 column, column, $2;"
            f" shr.u32 counter, tile, {shift}; shl.b32 counter, counter, 3;"
            " add.u32 counter, counter, $4;"
            f" @live {copy} [to], [map, {{column, $1}}], [counter]{', mask' if by_all else ''};"
            f" add.u32 tile, tile, {WARPS * SHARE};"
        )
    return text + " mov.u32 $0, 0; }"


@gluon.jit
def ask_for_tiles(
    desc, row, column, address, barriers, number, mask, PARAMETER: gl.constexpr,
    TILES: gl.constexpr, PER_BARRIER: gl.constexpr, SHARE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Copies of tiles side by side, 64 columns each, one behind the other from ``address`` on.

    Each barrier, of as many side by side as are needed, counts PER_BARRIER tiles. All barriers have
    been made, by all programs that share.

    Args:
        desc: of the tiles.
        row, column: where the first tile begins.
        address, barriers: of the first tile and barrier.
        number, mask: which of the programs that share this is, and one bit for each of them by
            their place in the cluster; anything where SHARE is 1.
        PARAMETER: the descriptor's name in PTX.
    """
    BYTES: gl.constexpr = desc.block_type.nbytes
    gl.inline_asm_elementwise(
        _asking(PARAMETER, TILES, PER_BARRIER, BYTES, WARPS, SHARE), "=r,r,r,r,r,r,r,~{memory}",
        [row, column, address, barriers, number, mask], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _asking_again(PARAMETER, TILES, BYTES, COLUMN, TO, COUNTER, WARP):
    """PTX that asks for tiles side by side, one by lane 0 of each warp from WARP on."""
    copy = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    return (
        "{ .reg .pred one; .reg .b32 lane, tile, to, column; .reg .b64 map;"
        " mov.u32 lane, %tid.x; shr.u32 tile, lane, 5; and.b32 lane, lane, 31;"
        f" sub.u32 tile, tile, {WARP}; setp.eq.u32 one, lane, 0;"
        f" setp.lt.and.u32 one, tile, {TILES}, one; mov.b64 map, {PARAMETER};"
        f" cvta.param.u64 map, map; mad.lo.u32 to, tile, {BYTES}, $3; shl.b32 column, tile, 6;"
        f" add.u32 column, column, $2; add.u32 column, column, {COLUMN};"
        f" @one {copy} [to+{TO}], [map, {{column, $1}}], [$4+{COUNTER}]; mov.u32 $0, 0; }}"
    )


@gluon.jit
def ask_again(
    desc, row, column, address, barriers, PARAMETER: gl.constexpr, STEP: gl.constexpr,
    SLOT: gl.constexpr, TILES: gl.constexpr, WARP: gl.constexpr,
):  # fmt: skip
    """A later step's TILES, side by side, into a slot of the ring, by as many warps from WARP on.

    What is known beforehand is in the instructions: 16 fillings with addresses of their own took
    so many registers that 84 bytes were spilled.

    Args:
        desc, row, PARAMETER: see :func:`ask_for_tiles`.
        column: where the first step begins.
        address, barriers: of the first slot.
    """
    BYTES: gl.constexpr = desc.block_type.nbytes
    gl.inline_asm_elementwise(
        _asking_again(
            PARAMETER, TILES, BYTES, STEP * TILES * 64, SLOT * TILES * BYTES, 8 * SLOT, WARP
        ),
        "=r,r,r,r,r,~{memory}", [row, column, address, barriers], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip
