"""A program's own rows of an MLP in clusters: their statistics, their sums, the result.

    statistics   [BLOCK_M / P] mean and 1 / deviation, from memory, to all programs
    sums         [BLOCK_M / P, 128] of P programs, in their order, at ``sums + program * piece``
    out          x + sums + fc2's bias, and statistics of what is stored (ops/linear/stats.py)

Rows are whole here, 128 columns at a time; which thread has which is exchange.py's.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastswin._triton.cluster_memory import cluster_wait, spread_statistics, wait_bytes
from fastswin.ops.cluster_mlp.exchange import lanes_of_row, receive_rows, whole_rows

#: Columns that a product's sums are sent by.
PART = gl.constexpr(128)


@gluon.jit
def load_own_rows(
    x_ptr, offset_ptr, first, M, C: gl.constexpr, P: gl.constexpr, BLOCK_M: gl.constexpr,
    OFFSET: gl.constexpr,
):  # fmt: skip
    """The rows whose statistics are a program's, 128 columns at a time, and what is added."""
    layout: gl.constexpr = whole_rows(BLOCK_M, P)
    row = first + gl.arange(0, BLOCK_M // P, gl.SliceLayout(1, layout))
    col = gl.arange(0, PART, gl.SliceLayout(0, layout))
    at = row[:, None] * C + col[None, :]
    rows = ()
    for part in gl.static_range(C // PART):
        x = gl.load(x_ptr + part * PART + at, mask=(row < M)[:, None], other=0.0)
        if OFFSET:
            x += gl.load(offset_ptr + part * PART + col)[None, :]
        rows = rows + (x,)  # noqa: RUF005
    return rows


@gluon.jit
def row_statistics(rows, eps, C: gl.constexpr):
    """Mean and 1 / deviation of rows that are held 128 columns at a time."""
    total = rows[0].to(gl.float32)
    for part in gl.static_range(1, C // PART):
        total += rows[part].to(gl.float32)
    mean = gl.sum(total, 1) / C
    square = gl.zeros_like(total)
    for part in gl.static_range(C // PART):
        apart = rows[part].to(gl.float32) - mean[:, None]
        square += apart * apart
    return mean, gl.rsqrt(gl.sum(square, 1) / C + eps)


@gluon.jit
def send_own_statistics(
    mean, rstd, places, barrier, program, P: gl.constexpr, BLOCK_M: gl.constexpr
):
    """A program's rows' statistics to all, in the place of x's first 64 columns."""
    ROWS: gl.constexpr = BLOCK_M // P
    row = program * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, whole_rows(BLOCK_M, P)))
    cluster_wait()
    spread_statistics(mean, rstd, places, barrier, row, lanes_of_row(P), P)


@gluon.jit
def added_sums(sums, vector, dtype: gl.constexpr, BLOCK_M: gl.constexpr, P: gl.constexpr):
    """128 columns of a program's rows: the sums of all programs, in their order."""
    piece: gl.constexpr = BLOCK_M // P * PART * 2
    y = receive_rows(sums, dtype, BLOCK_M, P).to(gl.float32)
    for other in gl.static_range(1, P):
        y += receive_rows(sums + other * piece, dtype, BLOCK_M, P).to(gl.float32)
    return y + vector[None, :]


@gluon.jit
def load_beside(x_ptr, fc2_bias_ptr, at, live, col, part: gl.constexpr):
    """What is added to 128 columns of the sums: fc2's bias, and the residual."""
    vector = gl.load(fc2_bias_ptr + part * PART + col)
    return vector, gl.load(x_ptr + part * PART + at, mask=live[:, None], other=0.0)


@gluon.jit
def finish_part(
    beside, sums, barrier, out_ptr, stats_out_ptr, at, row, live, M, part: gl.constexpr,
    dtype: gl.constexpr, COLUMNS: gl.constexpr, WRITE_STATS: gl.constexpr, BLOCK_M: gl.constexpr,
    P: gl.constexpr,
):  # fmt: skip
    """128 columns of V1's rows, once their sums have come."""
    wait_bytes(barrier)
    store_part(
        added_sums(sums, beside[0], dtype, BLOCK_M, P), beside[1], out_ptr + part * PART,
        stats_out_ptr, at, row, live, M, part, COLUMNS, WRITE_STATS,
    )  # fmt: skip


@gluon.jit
def store_part(
    y, residual, out_ptr, stats_out_ptr, at, row, live, M, part: gl.constexpr, PARTS: gl.constexpr,
    WRITE_STATS: gl.constexpr,
):  # fmt: skip
    """128 columns of the result, and statistics of what is stored."""
    stored = (y + residual.to(gl.float32)).to(residual.dtype)
    gl.store(out_ptr + at, stored, mask=live[:, None])
    if WRITE_STATS:
        y = stored.to(gl.float32)
        mean = gl.sum(y, 1) / PART
        y -= mean[:, None]
        to = stats_out_ptr + part * M + row
        gl.store(to, mean, mask=live)
        gl.store(to + PARTS * M, gl.sum(y * y, 1), mask=live)
