"""Sums of 64 rows on their way from one warp group to the same threads of another program.

A thread sends its 32 sums of 64 columns, two a register, as four vectors of 16 bytes, each beside
those of its group's other threads; the thread of the same number takes them up.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastswin._triton.gluon_tiles import accumulator

#: Bytes of 64 columns of a group's sums.
PART_BYTES = gl.constexpr(8192)


@gluon.constexpr_function
def _sending():
    """PTX that sends a thread's 32 sums of 64 columns."""
    address, barrier, rank = "$24", "$56", "$88"
    text = (
        "{ .reg .b32 to, counter; mov.u32 to, %tid.x; and.b32 to, to, 127; shl.b32 to, to, 4;"
        f" add.u32 to, to, {address}; mapa.shared::cluster.u32 to, to, {rank};"
        f" mapa.shared::cluster.u32 counter, {barrier}, {rank};"
    )
    for vector in range(4):
        four = ", ".join(f"${8 + 4 * vector + i}" for i in range(4))
        text += (
            " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
            f" [to+{2048 * vector}], {{{four}}}, [counter];"
        )
    return text + " }"


@gluon.constexpr_function
def _receiving():
    """PTX that takes up a thread's 32 sums."""
    text = (
        "{ .reg .b32 from; mov.u32 from, %tid.x; and.b32 from, from, 127; shl.b32 from, from, 4;"
        " add.u32 from, from, $16;"
    )
    for vector in range(4):
        four = ", ".join(f"${4 * vector + i}" for i in range(4))
        text += f" ld.shared.v4.b32 {{{four}}}, [from+{2048 * vector}];"
    return text + " }"


@gluon.jit
def send_part(sums, address, barrier, rank):
    """``sums [64, 64]``, 16-bit, to that address of program ``rank``, counted by its barrier."""
    gl.inline_asm_elementwise(
        _sending(), "=r," * 8 + "r," * 112 + "~{memory}",
        [sums.to(gl.int16, bitcast=True), address, barrier, rank], dtype=gl.int8, is_pure=False,
        pack=32,
    )  # fmt: skip


@gluon.jit
def receive_part(address, dtype: gl.constexpr):
    """What :func:`send_part` has left here."""
    at = gl.full([64, 64], address, gl.int32, accumulator(64))
    found = gl.inline_asm_elementwise(
        _receiving(), "=r," * 16 + "r," * 32 + "~{memory}", [at], dtype=gl.int16, is_pure=False,
        pack=32,
    )  # fmt: skip
    return found.to(dtype, bitcast=True)
