"""Shared memory of a cluster's programs: where it begins, and barriers that count what arrives.

Triton gives each program its own shared memory and no way to another's. A launch in clusters
(cluster.py) asks for some bytes more than the compiler counted, behind them ("the tail"), and PTX
reaches the tail of every program of the cluster: ``mapa`` turns an address of one's own into that
of another, and stores carry their own signal, counted in bytes by a barrier of the program they go
to. Barriers lie in the tail as well.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def tail_address(TAIL: gl.constexpr):
    """Where a program's last ``TAIL`` bytes begin, at a multiple of 128, for which 128 are spare.

    An address of the shared window, equal in all programs of the grid. ``global_smem`` is Triton's
    name for the memory that a launch sizes.
    """
    end = gl.inline_asm_elementwise(
        "{ .reg .b32 size; mov.u32 size, %dynamic_smem_size; mov.u32 $0, global_smem;"
        " add.u32 $0, $0, size; }",
        "=r", [], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return (end - TAIL + 127) // 128 * 128


@gluon.jit
def cluster_arrive():
    """This thread has done what it did; :func:`cluster_wait` of the others sees it."""
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; mov.u32 $0, 0;", "=r,~{memory}", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def cluster_arrive_relaxed():
    """:func:`cluster_arrive` of a thread that has read, or made barriers, and stored nothing else.

    Relaxed, without the fence that waits for all of a thread's stores: making a barrier has a fence
    of its own, and what has been read is in registers.
    """
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, 0;", "=r,~{memory}", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def cluster_wait():
    """Until all threads of the cluster have arrived."""
    gl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;", "=r,~{memory}", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def expect_bytes(barrier, BYTES: gl.constexpr):
    """Make a barrier of the tail for one filling of so many bytes; before a cluster barrier."""
    gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x;"
        " setp.eq.u32 first, thread, 0;"
        " @first mbarrier.init.shared::cta.b64 [$1], 1;"
        " @first fence.mbarrier_init.release.cluster;"
        " @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2; mov.u32 $0, 0; }",
        "=r,r,r,~{memory}", [barrier, BYTES], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_bytes(barrier):
    """Until the barrier's bytes have come; what they hold is visible then."""
    gl.inline_asm_elementwise(
        "{ .reg .pred done; TRY_AGAIN:"
        " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$1], 0;"
        " @!done bra TRY_AGAIN; mov.u32 $0, 0; }",
        "=r,r,~{memory}", [barrier], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fetch_bytes(ptr, address, barrier, BYTES: gl.constexpr):
    """Ask for memory that no kernel writes, after :func:`expect_bytes` of as many; multiples of 16.

    Thread 0, which has made the barrier, asks.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x;"
        " setp.eq.u32 first, thread, 0; @first"
        " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [$2], [$1], $4, [$3]; mov.u32 $0, 0; }",
        "=r,l,r,r,r,~{memory}", [ptr.to(gl.int64), address, barrier, BYTES], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def make_barriers(barriers, COUNT: gl.constexpr, NUMBER: gl.constexpr):
    """Make barriers side by side, each by a thread; COUNT arrivals complete one, time and again."""
    gl.inline_asm_elementwise(
        "{ .reg .pred own; .reg .b32 thread, at; mov.u32 thread, %tid.x;"
        f" setp.lt.u32 own, thread, {NUMBER}; shl.b32 at, thread, 3; add.u32 at, at, $1;"
        " @own mbarrier.init.shared::cta.b64 [at], $2;"
        " @own fence.mbarrier_init.release.cluster; mov.u32 $0, 0; }",
        "=r,r,r,~{memory}", [barriers, COUNT], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def expect_bytes_of_each(barriers, BYTES: gl.constexpr, NUMBER: gl.constexpr):
    """:func:`expect_bytes` of barriers side by side, each by a thread."""
    gl.inline_asm_elementwise(
        "{ .reg .pred own; .reg .b32 thread, at; mov.u32 thread, %tid.x;"
        f" setp.lt.u32 own, thread, {NUMBER}; shl.b32 at, thread, 3; add.u32 at, at, $1;"
        " @own mbarrier.init.shared::cta.b64 [at], 1;"
        " @own fence.mbarrier_init.release.cluster;"
        " @own mbarrier.arrive.expect_tx.shared::cta.b64 _, [at], $2; mov.u32 $0, 0; }",
        "=r,r,r,~{memory}", [barriers, BYTES], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def expect_more_bytes(barrier, BYTES: gl.constexpr):
    """The one arrival of a barrier's next filling."""
    gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x;"
        " setp.eq.u32 first, thread, 0;"
        " @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2; mov.u32 $0, 0; }",
        "=r,r,r,~{memory}", [barrier, BYTES], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def arrive_by_warp(barrier):
    """One arrival of each warp, not of a thread each."""
    gl.inline_asm_elementwise(
        "{ .reg .pred one; .reg .b32 thread, lane; mov.u32 thread, %tid.x;"
        " and.b32 lane, thread, 31; setp.eq.u32 one, lane, 0;"
        " @one mbarrier.arrive.shared::cta.b64 _, [$1]; mov.u32 $0, 0; }",
        "=r,r,~{memory}", [barrier], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_arrivals(barrier, PARITY: gl.constexpr):
    """Until the phase of this parity has completed, 0 for the first."""
    gl.inline_asm_elementwise(
        "{ .reg .pred done;"
        f" TRY_AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [$1], {PARITY};"
        " @!done bra TRY_AGAIN; mov.u32 $0, 0; }",
        "=r,r,~{memory}", [barrier], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def spread_statistics(
    mean, rstd, address, barrier, row, LANES: gl.constexpr, PROGRAMS: gl.constexpr
):
    """Two fp32 numbers a row to all programs of the cluster, 8 bytes a row of their barriers.

    LANES neighbours of a warp hold a row, at least one for each program.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred live; .reg .b32 lane, to, counter; mov.u32 lane, %tid.x;"
        f" and.b32 lane, lane, {LANES - 1}; setp.lt.u32 live, lane, {PROGRAMS};"
        f" and.b32 lane, lane, {PROGRAMS - 1}; shl.b32 to, $5, 3; add.u32 to, to, $3;"
        " mapa.shared::cluster.u32 to, to, lane; mapa.shared::cluster.u32 counter, $4, lane;"
        " @live st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32"
        " [to], {$1, $2}, [counter]; mov.u32 $0, 0; }",
        "=r," + "r," * 5 + "~{memory}",
        [mean.to(gl.int32, bitcast=True), rstd.to(gl.int32, bitcast=True), address, barrier, row],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def send_statistics(
    mean, deviations, address, barrier, rank, row, ROWS: gl.constexpr, WARPS: gl.constexpr = 1
):
    """Two fp32 numbers a row to program ``rank``, 8 bytes a row of its barrier.

    Four neighbours of a warp share a row, and so do as many warps as ``WARPS`` says.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred live, one; .reg .b32 lane, to, counter; mov.u32 lane, %tid.x;"
        f" and.b32 lane, lane, {32 * (WARPS - 1) + 3}; setp.eq.u32 one, lane, 0;"
        f" setp.lt.and.s32 live, $6, {ROWS}, one;"
        " shl.b32 to, $6, 3; add.u32 to, to, $3;"
        " mapa.shared::cluster.u32 to, to, $5; mapa.shared::cluster.u32 counter, $4, $5;"
        " @live st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32"
        " [to], {$1, $2}, [counter]; mov.u32 $0, 0; }",
        "=r," + "r," * 6 + "~{memory}",
        [mean.to(gl.int32, bitcast=True), deviations.to(gl.int32, bitcast=True), address, barrier,
         rank, row],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def receive_statistics(address, row):
    """Both numbers of each row that :func:`send_statistics` has left here."""
    mean, deviations = gl.inline_asm_elementwise(
        "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r,~{memory}", [address + row * 8],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return mean.to(gl.float32, bitcast=True), deviations.to(gl.float32, bitcast=True)


@gluon.jit
def part_statistics(x, COLUMNS: gl.constexpr):
    """Mean and sum of squared deviations of each row of so many columns."""
    mean = gl.sum(x, 1) / COLUMNS
    x -= mean[:, None]
    return mean, gl.sum(x * x, 1)


@gluon.jit
def joined_statistics(
    address, row, eps, COLUMNS: gl.constexpr, PARTS: gl.constexpr, BYTES: gl.constexpr
):
    """Mean and 1 / deviation of whole rows from those of their parts, ``BYTES`` from each other."""
    mean = gl.zeros_like(row).to(gl.float32)
    for part in gl.static_range(PARTS):
        found, _ = receive_statistics(address + part * BYTES, row)
        mean += found
    mean = mean / PARTS
    square = gl.zeros_like(mean)
    for part in gl.static_range(PARTS):
        found, deviations = receive_statistics(address + part * BYTES, row)
        square += deviations + COLUMNS * (found - mean) * (found - mean)
    return mean, gl.rsqrt(square / (COLUMNS * PARTS) + eps)
