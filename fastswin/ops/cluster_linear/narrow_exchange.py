"""Sums of a narrow tile, cut along K, from all programs of a cluster to those who add them.

A tile of 16 or 32 rows of the result is the product's other way round, ``weight @ x.T``: tensor
cores take 64 lines of their first operand at least, but 8 of the second. Each program has
``[BLOCK_N, BLOCK_M]`` fp32 in their layout: a warp has 16 features, a thread two rows of every 8,
of two features 8 apart. Program r adds rows ``r * BLOCK_M / SPLITS`` and on, a multiple of 8; a
thread's four values of 8 rows cross as 16 bytes and are taken up by a thread of the same place.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastswin.ops.cluster_linear.exchange import constraints


@gluon.constexpr_function
def narrow_layout(ROWS, BLOCK_N):
    """Layout in which a program finishes its rows, up to 16 bytes a thread of what it stores."""
    values = min(8, ROWS // 2)  # ROWS * BLOCK_N, shared by 2 * BLOCK_N threads
    along = BLOCK_N // values
    return gl.BlockedLayout([1, values], [32 // along, along], [BLOCK_N // 16, 1], [1, 0])


@gluon.constexpr_function
def _received_layout(ROWS, BLOCK_N):
    """Layout of what came: that of the product, turned, of some of its rows."""
    registers = [[1, 0], [0, 8]] + ([[8, 0]] if ROWS >= 16 else [])
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    warps = [[0, 16 * 2**bit] for bit in range((BLOCK_N // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [ROWS, BLOCK_N])


@gluon.constexpr_function
def _sending(BLOCK_M, SPLITS):
    """PTX that stores a thread's ``BLOCK_M / 2`` sums where they are added."""
    values, eights = BLOCK_M // 2, BLOCK_M // 8
    outputs, each = eights, eights // SPLITS
    address, barrier = f"${outputs + values}", f"${outputs + 2 * values}"
    text = (
        "{ .reg .pred own; .reg .b32 below, to, counter, rank, here; mov.u32 below, %tid.x;"
        " mov.u32 here, %cluster_ctarank;"
        f" and.b32 rank, here, {0x100 - SPLITS}; shl.b32 to, below, 4; and.b32 to, to, 511;"
        f" shr.u32 below, below, 5; mad.lo.u32 below, below, {512 * each}, to;"
        f" add.u32 below, below, {address};"
    )
    for i in range(eights):
        if i % each == 0:
            text += (
                " mapa.shared::cluster.u32 to, below, rank;"
                f" mapa.shared::cluster.u32 counter, {barrier}, rank; setp.eq.u32 own, rank, here;"
                " add.u32 rank, rank, 1;"
            )
        four = ", ".join(f"${outputs + 4 * i + k}" for k in range(4))
        text += (
            " @!own st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
            f" [to+{512 * (i % each)}], {{{four}}}, [counter];"
            f" @own st.shared.v4.b32 [below+{512 * (i % each)}], {{{four}}};"
        )
    return text + " }"


@gluon.constexpr_function
def _receiving(ROWS):
    """PTX that takes up what one program has sent to a thread."""
    each = ROWS // 8
    values = 4 * each
    text = (
        "{ .reg .b32 warp, from; mov.u32 warp, %tid.x; shl.b32 from, warp, 4;"
        " and.b32 from, from, 511; shr.u32 warp, warp, 5;"
        f" mad.lo.u32 from, warp, {512 * each}, from; add.u32 from, from, ${values};"
    )
    for i in range(each):
        found = ", ".join(f"${4 * i + k}" for k in range(4))
        text += f" ld.shared.v4.b32 {{{found}}}, [from+{512 * i}];"
    return text + " }"


@gluon.jit
def send_narrow(sums, address, barrier, BLOCK_M: gl.constexpr, SPLITS: gl.constexpr):
    """Each program's rows of ``sums [BLOCK_N, BLOCK_M]`` to its ``address``, counted there."""
    gl.inline_asm_elementwise(
        _sending(BLOCK_M, SPLITS),
        constraints(BLOCK_M // 8, 3 * BLOCK_M // 2),
        [sums.to(gl.int32, bitcast=True), address, barrier], dtype=gl.int8, is_pure=False,
        pack=BLOCK_M // 2,
    )  # fmt: skip


@gluon.jit
def receive_narrow(address, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """``[ROWS, BLOCK_N]`` fp32 that a program has sent to an address of this one."""
    layout: gl.constexpr = _received_layout(ROWS, BLOCK_N)
    values: gl.constexpr = ROWS // 2
    at = gl.full([ROWS, BLOCK_N], address, gl.int32, layout)
    found = gl.inline_asm_elementwise(
        _receiving(ROWS), constraints(values, values), [at], dtype=gl.int32, is_pure=False,
        pack=values,
    )  # fmt: skip
    return found.to(gl.float32, bitcast=True)
