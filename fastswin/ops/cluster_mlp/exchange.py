"""Rows of an MLP in clusters, on their way into registers and as sums between programs.

A thread of a product has two rows, 8 apart, and of every 8 columns two neighbours. As weights are
packed (packing.py), what it has of 32 columns of a row are 8 neighbours: 16 bytes, the unit in
which it copies x from memory, reads it as first operand, sends sums and takes up those of others.

    x            copied by each thread to places of its own, in the tail; no other reads them
    statistics   mean and 1 / deviation of BLOCK_M rows, from the program that adds up their sums
    sums         16-bit ``[BLOCK_M, 128]`` of each program: rows ``r * BLOCK_M / P`` and on to
                 program r
    offset       16-bit ``[C]``, as in memory, behind all of these

Places of the first three are the same memory. Between the last read of x's first 64 columns and the
first statistics stands a phase of the cluster's barrier, another between the last read of x and of
statistics and the first sum. What one program sends to another lies by 32 columns, rows and 16
bytes, in every second of the 32 columns with neighbouring rows in each other's place: the
receiver's warps, which take up a row with 16 threads of 16 bytes or 32 of 8, so meet no bank twice.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastswin._triton.gluon_tiles import accumulator


@gluon.constexpr_function
def operand(BLOCK_M):
    """Layout of 64 columns of rows as a first operand."""
    return gl.DotOperandLayout(0, accumulator(64, BLOCK_M), 2)


@gluon.constexpr_function
def rows_layout(BLOCK_M, P):
    """Layout of ``[BLOCK_M / P, 128]`` as a program takes them up, each row by one warp.

    So sums over columns are shuffles and no meeting of all warps. A row's threads are neighbours:
    Triton 3.6 adds up with those next to each other whatever a layout says.
    """
    rows = [[2**bit, 0] for bit in range((BLOCK_M // P).bit_length() - 1)]
    some = 3 if P <= 8 else 2  # 8 neighbours a thread, or 4
    near = [[0, 2**bit] for bit in range(some, 5)] + [[0, 32], [0, 64]]
    warps = (BLOCK_M // 16).bit_length() - 1
    down = rows[some - 2 :]
    return gl.DistributedLinearLayout(
        [[0, 2**bit] for bit in range(some)] + down[warps:], near + rows[: some - 2], down[:warps],
        [], [BLOCK_M // P, 128],
    )  # fmt: skip


@gluon.constexpr_function
def lanes_of_row(P):
    """Neighbours of a warp that hold a row of :func:`whole_rows`."""
    return 16 if P <= 8 else 32


@gluon.constexpr_function
def whole_rows(BLOCK_M, P):
    """Layout of 128 columns of ``BLOCK_M / P`` rows, each of them in one warp."""
    lanes = lanes_of_row(P)
    return gl.BlockedLayout([1, 128 // lanes], [32 // lanes, lanes], [BLOCK_M // 16, 1], [1, 0])


@gluon.constexpr_function
def _staging(BLOCK_M, C):
    """PTX that asks for a thread's values of x; without bytes of a row for zeros."""
    text = (
        "{ .reg .b32 to; mov.u32 to, %tid.x; shl.b32 to, to, 4; add.u32 to, to, $4; mov.u32 $0, 0;"
    )
    for unit in range(C // 16):
        half, step = unit % 2, unit // 2
        text += (
            f" cp.async.cg.shared.global [to+{32 * BLOCK_M * unit}],"
            f" [$1+{16 * C * half + 64 * step}], 16, ${2 + half};"
        )
        if unit % 4 == 3:
            text += " cp.async.commit_group;"
    return text + " }"


@gluon.constexpr_function
def _taking(BLOCK_M, STEP, OUTSTANDING):
    """PTX that reads 64 columns of x into a first operand."""
    text = "{ .reg .b32 from; mov.u32 from, %tid.x; shl.b32 from, from, 4; add.u32 from, from, $16;"
    if OUTSTANDING >= 0:
        text += f" cp.async.wait_group {OUTSTANDING};"
    for unit in range(4):
        four = ", ".join(f"${8 * (unit // 2) + 2 * i + unit % 2}" for i in range(4))
        text += f" ld.shared.v4.b32 {{{four}}}, [from+{32 * BLOCK_M * (4 * STEP + unit)}];"
    return text + " }"


@gluon.constexpr_function
def _taking_offset(STEP):
    """PTX that reads what is added to 64 columns of x, in the order of :func:`_taking`."""
    text = (
        "{ .reg .b32 from; mov.u32 from, %tid.x; and.b32 from, from, 3; shl.b32 from, from, 4;"
        " add.u32 from, from, $16;"
    )
    for unit in range(4):
        four = ", ".join(f"${8 * (unit // 2) + 2 * i + unit % 2}" for i in range(4))
        text += f" ld.shared.v4.b32 {{{four}}}, [from+{128 * STEP + 64 * (unit // 2)}];"
    return text + " }"


@gluon.constexpr_function
def _sending(BLOCK_M, P):
    """PTX that sends a thread's 64 sums of 128 columns, two a register."""
    rows = BLOCK_M // P
    address, barrier = "$48", "$112"
    text = (
        "{ .reg .b32 warp, lane, below, odd, to, other, counter; mov.u32 lane, %tid.x;"
        " shr.u32 warp, lane, 5; and.b32 lane, lane, 31;"
    )
    if rows >= 16:
        text += (
            " shl.b32 below, lane, 4;"
            f" rem.u32 lane, warp, {rows // 16}; mad.lo.u32 below, lane, 1024, below;"
            f" div.u32 warp, warp, {rows // 16};"
        )
    else:
        text += (
            f" rem.u32 below, lane, {4 * rows}; shl.b32 below, below, 4;"
            f" div.u32 lane, lane, {4 * rows}; mad.lo.u32 warp, warp, {16 // rows}, lane;"
        )
    text += (
        f" xor.b32 odd, below, 64; add.u32 below, below, {address}; add.u32 odd, odd, {address};"
    )
    for half in range(2):
        if rows < 16 and half:
            text += f" add.u32 warp, warp, {8 // rows};"
        if rows < 16 or not half:
            text += (
                " mapa.shared::cluster.u32 to, below, warp;"
                " mapa.shared::cluster.u32 other, odd, warp;"
                f" mapa.shared::cluster.u32 counter, {barrier}, warp;"
            )
        for group in range(4):
            four = ", ".join(f"${16 + 8 * group + 2 * i + half}" for i in range(4))
            place = 64 * rows * group + (512 * half if rows >= 16 else 0)
            text += (
                " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
                f" [{'other' if group % 2 else 'to'}+{place}], {{{four}}}, [counter];"
            )
    return text + " }"


@gluon.constexpr_function
def _receiving(BLOCK_M, P):
    """PTX that takes up a thread's values of what one program has sent."""
    values, rows = 64 // P, BLOCK_M // P
    some = min(4, values // 2)
    chunks = 16 // some  # threads of 32 columns
    lanes = chunks.bit_length() - 1
    text = (
        "{ .reg .b32 from, group, row; mov.u32 row, %tid.x;"
        f" and.b32 from, row, {chunks - 1}; shl.b32 from, from, {(4 * some).bit_length() - 1};"
        f" add.u32 from, from, ${values // 2};"
        f" shr.u32 group, row, {lanes}; and.b32 group, group, 3;"
        f" mad.lo.u32 from, group, {64 * rows}, from; and.b32 group, group, 1;"
        f" shr.u32 row, row, {lanes + 2}; xor.b32 row, row, group; mad.lo.u32 from, row, 64, from;"
    )
    for i in range(values // 2 // some):
        found = ", ".join(f"${some * i + k}" for k in range(some))
        text += f" ld.shared.v{some}.b32 {{{found}}}, [from+{32 * rows * i}];"
    return text + " }"


@gluon.jit
def stage_rows(x_ptr, row0, M, address, C: gl.constexpr, BLOCK_M: gl.constexpr):
    """Ask for rows ``row0`` and on, to an address of the tail; 64 columns of all are a group."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [BLOCK_M // 16], [0])
    thread = gl.arange(0, 2 * BLOCK_M, one)
    row = row0 + thread // 32 * 16 + thread % 32 // 4
    x = x_ptr + row * C + thread % 4 * 8
    gl.inline_asm_elementwise(
        _staging(BLOCK_M, C), "=r,l,r,r,r,~{memory}",
        [x, gl.where(row < M, 16, 0), gl.where(row + 8 < M, 16, 0), address], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def take_rows(
    address, dtype: gl.constexpr, STEP: gl.constexpr, OUTSTANDING: gl.constexpr,
    BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Columns ``64 * STEP`` and on of :func:`stage_rows`'s rows, in the order of packed channels.

    Behind them so many groups may be on their way; -1 where they have come.
    """
    at = gl.full([BLOCK_M, 64], address, gl.int32, operand(BLOCK_M))
    found = gl.inline_asm_elementwise(
        _taking(BLOCK_M, STEP, OUTSTANDING), "=r," * 16 + "r," * 32 + "~{memory}", [at],
        dtype=gl.int16, is_pure=False, pack=32,
    )  # fmt: skip
    return found.to(dtype, bitcast=True)


@gluon.jit
def take_offset(address, dtype: gl.constexpr, STEP: gl.constexpr, BLOCK_M: gl.constexpr):
    """What is added to :func:`take_rows`'s columns, the same in each row; 16-bit ``[C]``."""
    at = gl.full([BLOCK_M, 64], address, gl.int32, operand(BLOCK_M))
    found = gl.inline_asm_elementwise(
        _taking_offset(STEP), "=r," * 16 + "r," * 32 + "~{memory}", [at], dtype=gl.int16,
        is_pure=False, pack=32,
    )  # fmt: skip
    return found.to(dtype, bitcast=True)


@gluon.jit
def send_rows(sums, address, barrier, BLOCK_M: gl.constexpr, P: gl.constexpr):
    """Each program's rows of ``sums [BLOCK_M, 128]``, 16-bit, to its ``address``."""
    gl.inline_asm_elementwise(
        _sending(BLOCK_M, P), "=r," * 16 + "r," * 160 + "~{memory}",
        [sums.to(gl.int16, bitcast=True), address, barrier], dtype=gl.int8, is_pure=False, pack=64,
    )  # fmt: skip


@gluon.jit
def receive_rows(address, dtype: gl.constexpr, BLOCK_M: gl.constexpr, P: gl.constexpr):
    """``[BLOCK_M / P, 128]``, columns as they are in memory, that a program has sent here."""
    values: gl.constexpr = 64 // P
    at = gl.full([BLOCK_M // P, 128], address, gl.int32, rows_layout(BLOCK_M, P))
    found = gl.inline_asm_elementwise(
        _receiving(BLOCK_M, P), "=r," * (values // 2) + "r," * values + "~{memory}", [at],
        dtype=gl.int16, is_pure=False, pack=values,
    )  # fmt: skip
    return found.to(dtype, bitcast=True)


@gluon.jit
def computed_here(values):
    """16-bit values as they are, which the compiler must not compute later than here.

    It moved GELU to where its result is used, behind the wait for the products that were to run
    beside it.
    """
    kept = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [values.to(gl.int16, bitcast=True)], dtype=gl.int16,
        is_pure=False, pack=2,
    )  # fmt: skip
    return kept.to(values.dtype, bitcast=True)
