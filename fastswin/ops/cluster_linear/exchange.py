"""Sums of a product's tile, cut along K, from all programs of a cluster to those who add them.

Each of SPLITS programs has sums of its part of K for a whole tile ``[BLOCK_M, BLOCK_N]``, fp32, in
the layout that tensor cores leave: a warp has 16 rows, a thread 4 values of every 8 columns, two
neighbours in one row and two 8 rows further. Program r adds rows ``r * BLOCK_M / SPLITS`` and on.
A thread's four values cross as 16 bytes and are taken up by a thread of the same lane, so nobody
computes an address twice: a receiver's warps share the columns, 8 at a time (:func:`rows_layout`).
Of 64 rows 8 programs have 8 each, then two values cross.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastswin._triton.gluon_tiles import accumulator


@gluon.constexpr_function
def rows_layout(BLOCK_M, BLOCK_N, SPLITS, ACROSS=1):
    """Layout of a program's rows of a tile; the tile's own where there is one program."""
    if SPLITS == 1:
        return accumulator(BLOCK_N, BLOCK_M, ACROSS)
    rows = BLOCK_M // SPLITS
    warps = BLOCK_M // 16
    across = min(warps, SPLITS)  # warps that share a row
    registers = [[0, 1]] if rows == 8 else [[0, 1], [8, 0]]
    column = 8 * across
    while column < BLOCK_N:
        registers.append([0, column])
        column *= 2
    along = [[0, 8 * 2**bit] for bit in range(across.bit_length() - 1)]
    down = [[16 * 2**bit, 0] for bit in range((warps // across).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, along + down, [], [rows, BLOCK_N])


@gluon.constexpr_function
def _sending(BLOCK_M, BLOCK_N, SPLITS):
    """PTX that stores a thread's ``BLOCK_N / 2`` sums where they are added.

    Programs of one tile are SPLITS in a row of their cluster, which may hold several tiles.
    """
    values, outputs = BLOCK_N // 2, BLOCK_N // 8
    address, barrier = f"${outputs + values}", f"${outputs + 2 * values}"
    store = "@!own st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
    text = (
        "{ .reg .pred own; .reg .b32 warp, lane, below, to, counter, tile, rank;"
        " mov.u32 lane, %tid.x; shr.u32 warp, lane, 5; and.b32 lane, lane, 31;"
        f" mov.u32 rank, %cluster_ctarank; and.b32 tile, rank, {0x100 - SPLITS};"
    )
    if BLOCK_M // SPLITS == 8:
        text += f" shl.b32 lane, lane, 3; add.u32 below, {address}, lane; shl.b32 warp, warp, 1;"
        text += " add.u32 warp, warp, tile;"
        for half in range(2):
            text += " mapa.shared::cluster.u32 to, below, warp;"
            text += f" mapa.shared::cluster.u32 counter, {barrier}, warp;"
            text += " setp.eq.u32 own, warp, rank;"
            for i in range(outputs):
                first = outputs + 4 * i + 2 * half
                two = f"{{${first}, ${first + 1}}}"
                text += f" {store}.v2.b32 [to+{256 * i}], {two}, [counter];"
                text += f" @own st.shared.v2.b32 [below+{256 * i}], {two};"
            text += " add.u32 warp, warp, 1;"
        return text + " }"
    warps_of_one = BLOCK_M // 16 // SPLITS
    text += (
        f" shl.b32 lane, lane, 4; rem.u32 below, warp, {warps_of_one};"
        f" mad.lo.u32 below, below, {64 * BLOCK_N}, lane; add.u32 below, below, {address};"
        f" div.u32 warp, warp, {warps_of_one}; add.u32 warp, warp, tile;"
        " mapa.shared::cluster.u32 to, below, warp;"
        f" mapa.shared::cluster.u32 counter, {barrier}, warp; setp.eq.u32 own, warp, rank;"
    )
    for i in range(outputs):
        four = ", ".join(f"${outputs + 4 * i + k}" for k in range(4))
        text += f" {store}.v4.b32 [to+{512 * i}], {{{four}}}, [counter];"
        text += f" @own st.shared.v4.b32 [below+{512 * i}], {{{four}}};"
    return text + " }"


@gluon.constexpr_function
def _receiving(BLOCK_M, BLOCK_N, SPLITS):
    """PTX that takes up what one program has sent to a thread."""
    rows = BLOCK_M // SPLITS
    across = min(BLOCK_M // 16, SPLITS)
    values = rows * BLOCK_N // (2 * BLOCK_M)
    some, shift = (2, 3) if rows == 8 else (4, 4)
    group = 32 * 4 * some  # bytes of 8 columns
    text = (
        "{ .reg .b32 warp, lane, from; mov.u32 lane, %tid.x; shr.u32 warp, lane, 5;"
        f" and.b32 lane, lane, 31; shl.b32 lane, lane, {shift}; rem.u32 from, warp, {across};"
        f" mad.lo.u32 lane, from, {group}, lane; div.u32 warp, warp, {across};"
        f" mad.lo.u32 from, warp, {64 * BLOCK_N}, lane; add.u32 from, from, ${values};"
    )
    for i in range(values // some):
        found = ", ".join(f"${some * i + k}" for k in range(some))
        text += f" ld.shared.v{some}.b32 {{{found}}}, [from+{across * group * i}];"
    return text + " }"


@gluon.constexpr_function
def constraints(outputs, inputs):
    """Registers of inline assembly that touches memory."""
    return "=r," * outputs + "r," * inputs + "~{memory}"


@gluon.jit
def send_rows(
    sums, address, barrier, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPLITS: gl.constexpr
):
    """Each program's rows of ``sums`` to its ``address``, counted by its ``barrier``."""
    gl.inline_asm_elementwise(
        _sending(BLOCK_M, BLOCK_N, SPLITS), constraints(BLOCK_N // 8, 3 * BLOCK_N // 2),
        [sums.to(gl.int32, bitcast=True), address, barrier], dtype=gl.int8, is_pure=False,
        pack=BLOCK_N // 2,
    )  # fmt: skip


@gluon.jit
def receive_rows(
    address, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPLITS: gl.constexpr
):  # fmt: skip
    """``[BLOCK_M / SPLITS, BLOCK_N]`` fp32 that a program has sent to an address of this one."""
    layout: gl.constexpr = rows_layout(BLOCK_M, BLOCK_N, SPLITS)
    values: gl.constexpr = BLOCK_N // 2 // SPLITS
    at = gl.full([BLOCK_M // SPLITS, BLOCK_N], address, gl.int32, layout)
    found = gl.inline_asm_elementwise(
        _receiving(BLOCK_M, BLOCK_N, SPLITS), constraints(values, values), [at], dtype=gl.int32,
        is_pure=False, pack=values,
    )  # fmt: skip
    return found.to(gl.float32, bitcast=True)
