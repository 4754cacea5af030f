"""What the programs of a cluster say to each other, through distributed shared memory.

The tail (_triton/cluster_memory.py) holds barriers, and pieces of rows: 64 rows by 32 columns are
16 values a thread in the layout that a tensor-core product leaves and the next takes its first
operand in, so a piece crosses as registers, each thread to the thread of its own number elsewhere;
no layout changes, nobody converts addresses.

Threads of rows that no window has (49 rows fill 100 threads of 128) send nothing; what their
receivers read there is arbitrary.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def send_piece(piece, address, barrier, rank, THREADS: gl.constexpr):
    """Sixteen 16-bit values a thread to an address of program ``rank``, 32 bytes of its barrier."""
    gl.inline_asm_elementwise(
        "{ .reg .pred live; .reg .b32 thread, to, counter; mov.u32 thread, %tid.x;"
        f" setp.lt.u32 live, thread, {THREADS};"
        " shl.b32 thread, thread, 4; add.u32 to, $12, thread;"
        " mapa.shared::cluster.u32 to, to, $44; mapa.shared::cluster.u32 counter, $28, $44;"
        " @live st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
        " [to], {$4, $5, $6, $7}, [counter];"
        " @live st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
        f" [to+{16 * THREADS}], {{$8, $9, $10, $11}}, [counter]; }}",
        "=r,=r,=r,=r," + "r," * 56 + "~{memory}",
        [piece, address, barrier, rank], dtype=gl.int8, is_pure=False, pack=16,
    )  # fmt: skip


@gluon.jit
def receive_piece(address, dtype: gl.constexpr, THREADS: gl.constexpr, LAYOUT: gl.constexpr):
    """``[64, 32]`` of 16 bits that :func:`send_piece` has left at an address of this program."""
    at = gl.full([64, 32], address, gl.int32, LAYOUT)
    values = gl.inline_asm_elementwise(
        "{ .reg .b32 thread, from; mov.u32 thread, %tid.x; shl.b32 thread, thread, 4;"
        " add.u32 from, $8, thread; ld.shared.v4.b32 {$0, $1, $2, $3}, [from];"
        f" ld.shared.v4.b32 {{$4, $5, $6, $7}}, [from+{16 * THREADS}]; }}",
        "=r," * 8 + "r," * 16 + "~{memory}", [at], dtype=gl.int16, is_pure=False, pack=16,
    )  # fmt: skip
    return values.to(dtype, bitcast=True)


@gluon.jit
def send_sums(piece, address, barrier, rank, THREADS: gl.constexpr):
    """Sixteen fp32 values a thread to ``address`` of program ``rank``, 64 bytes of its barrier."""
    store: gl.constexpr = " @live st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
    gl.inline_asm_elementwise(
        "{ .reg .pred live; .reg .b32 thread, to, counter; mov.u32 thread, %tid.x;"
        f" setp.lt.u32 live, thread, {THREADS};"
        " shl.b32 thread, thread, 4; add.u32 to, $20, thread;"
        " mapa.shared::cluster.u32 to, to, $52; mapa.shared::cluster.u32 counter, $36, $52;"
        + store + " [to], {$4, $5, $6, $7}, [counter];"
        + store + f" [to+{16 * THREADS}], {{$8, $9, $10, $11}}, [counter];"
        + store + f" [to+{32 * THREADS}], {{$12, $13, $14, $15}}, [counter];"
        + store + f" [to+{48 * THREADS}], {{$16, $17, $18, $19}}, [counter]; }}",
        "=r,=r,=r,=r," + "r," * 64 + "~{memory}",
        [piece.to(gl.int32, bitcast=True), address, barrier, rank],
        dtype=gl.int8, is_pure=False, pack=16,
    )  # fmt: skip


@gluon.jit
def receive_sums(address, THREADS: gl.constexpr, LAYOUT: gl.constexpr):
    """``[64, 32]`` of fp32 that :func:`send_sums` has left at an address of this program."""
    at = gl.full([64, 32], address, gl.int32, LAYOUT)
    values = gl.inline_asm_elementwise(
        "{ .reg .b32 thread, from; mov.u32 thread, %tid.x; shl.b32 thread, thread, 4;"
        " add.u32 from, $16, thread; ld.shared.v4.b32 {$0, $1, $2, $3}, [from];"
        f" ld.shared.v4.b32 {{$4, $5, $6, $7}}, [from+{16 * THREADS}];"
        f" ld.shared.v4.b32 {{$8, $9, $10, $11}}, [from+{32 * THREADS}];"
        f" ld.shared.v4.b32 {{$12, $13, $14, $15}}, [from+{48 * THREADS}]; }}",
        "=r," * 16 + "r," * 16 + "~{memory}", [at], dtype=gl.int32, is_pure=False, pack=16,
    )  # fmt: skip
    return values.to(gl.float32, bitcast=True)
