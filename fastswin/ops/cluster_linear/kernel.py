"""A product of few rows whose weights wait in shared memory, K cut across a cluster's programs.

    out = residual + act(norm(x) @ weight.T + bias)         residual + norm(x @ weight.T + bias)

    x [M, K]   weight [N, K]   residual, out [M, N]   bias, weight_sums, norm weight and bias [N]
    norm_stats, stats_out [2, parts, M] fp32 (ops/linear/stats.py)

With 49 to 1,568 rows a product takes a microsecond of arithmetic. The rest is latency: the launch,
x's way from L2, steps that depend on each other. So a program asks for its tile of the weight
through the copy engine before it waits for the kernel in front (_triton/pdl.py); behind the wait x
comes the same way, all of it at once where the ring has a slot for every step (ring.py). Where it
has not, half of the ring's part of the weight is asked for before the wait, the other half behind
x: a multiprocessor takes 100 to 130 bytes/ns, by which each tile of the weight in front of x's
first delays it by 0.14 us. Long K in rings of 100 to 160 KB is faster than in 220: whole models by
1 to 2 %. Asking takes a warp 75 ns a copy, so two or four ask (_triton/tile_copies.py), and
programs with the same rows or columns may be one cluster, each of which asks for a part of what all
need.

Tensor cores take 64 lines of the first operand at least, 8 of the second. So tiles of 16 or 32 rows
are the product the other way round (narrow_exchange.py): fewer bytes of x to wait for, and more
threads to share what stands behind the product.

Where K is long, SPLITS programs share a tile, each multiplies its part of K, and all send the
others' rows of their sums by distributed shared memory (exchange.py): one adds ``BLOCK_M / SPLITS``
rows of all, in the order of the programs, with bias and residual. No sums go through memory, no
second launch adds them.

LayerNorm may stand behind the product, whose statistics the product that wrote x has left:

    norm(x) @ W.T = rstd * (x @ W.T - mean * W.sum(1))

Statistics are asked for in front of the products and joined behind or beside them: waiting for
them in front took 0.9 to 1.7 us of each launch. V2's LayerNorm stands behind too, of the product's
results: then a cluster holds all programs of its rows, who tell each other their columns'
statistics.

2 M N K FLOPs; L2 delivers ``M N K (1 / BLOCK_M + 1 / BLOCK_N) * 2`` bytes, half of them before the
wait, and programs send ``4 M N (SPLITS - 1)`` to each other. A tile leaves by 16 bytes a thread: as
tensor cores leave it, 4 bytes in 8 rows at once, 64 x 128 took 0.35 us and 128 x 128 1.3 us longer.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from fastswin._triton.cluster_memory import (
    cluster_arrive,
    cluster_wait,
    expect_bytes,
    expect_bytes_of_each,
    tail_address,
    wait_arrivals,
    wait_bytes,
)
from fastswin._triton.gluon_statistics import join_parts, load_parts, part_columns
from fastswin._triton.gluon_tiles import accumulator
from fastswin._triton.math import gelu
from fastswin._triton.pdl import wait_for_previous
from fastswin._triton.row_statistics import join_stats, load_stats
from fastswin._triton.tile_copies import ask_for_tiles, ring_address
from fastswin.ops.cluster_linear.exchange import (
    receive_rows,
    rows_layout,
    send_rows,
)
from fastswin.ops.cluster_linear.finish import row_statistics, store_tile
from fastswin.ops.cluster_linear.narrow_exchange import (
    narrow_layout,
    receive_narrow,
    send_narrow,
)
from fastswin.ops.cluster_linear.ring import (
    WEIGHT,
    X,
    asking_warps,
    fill_again,
    first_tile,
    multiply_step,
    parameter,
    ring_tiles,
)


@gluon.jit
def _place(
    N: gl.constexpr, BLOCK_N: gl.constexpr, SPLITS: gl.constexpr, SHARE_ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """Tile of rows, tile of columns, part of K; places of both tiles in the cluster."""
    rank = gl.program_id(0) % (SPLITS * SHARE_ROWS * COLUMNS)
    cluster = gl.program_id(0) // (SPLITS * SHARE_ROWS * COLUMNS)
    down = rank // SPLITS % SHARE_ROWS
    across = rank // (SPLITS * SHARE_ROWS)
    across_all: gl.constexpr = N // BLOCK_N // COLUMNS
    tile_row = cluster // across_all * SHARE_ROWS + down
    tile_col = cluster % across_all * COLUMNS + across
    return tile_row, tile_col, rank % SPLITS, down, across


@gluon.constexpr_function
def _every(STEP, COUNT):
    """Bits for so many programs of a cluster, so far from each other."""
    return sum(1 << STEP * i for i in range(COUNT))


@gluon.jit(do_not_specialize=["M"])
def _cluster_linear_kernel(
    out_ptr, x_desc, weight_desc, bias_ptr, residual_ptr, norm_stats_ptr, weight_sums_ptr,
    stats_out_ptr, norm_weight_ptr, norm_bias_ptr, M, eps,
    N: gl.constexpr, STEPS: gl.constexpr, SLOTS: gl.constexpr, EARLY: gl.constexpr,
    SPLITS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    SHARE_ROWS: gl.constexpr, SHARE_COLUMNS: gl.constexpr, COLUMNS: gl.constexpr,
    ACROSS: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr, GELU: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, PARTS: gl.constexpr,
    WRITE_STATS: gl.constexpr, POST_NORM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Programs of a cluster: parts of K fastest, then tiles of rows, then tiles of columns.

    With PARTS rows are normalised behind the product, with POST_NORM its results are: then a
    cluster holds all tiles of a row.
    """
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    tile_row, tile_col, part, down, across = _place(N, BLOCK_N, SPLITS, SHARE_ROWS, COLUMNS)
    row0 = tile_row * BLOCK_M
    col0 = tile_col * BLOCK_N
    k0 = part * (STEPS * BLOCK_K)
    ROWS: gl.constexpr = BLOCK_M // SPLITS
    CLUSTER: gl.constexpr = SPLITS * SHARE_ROWS * COLUMNS
    BLOCKS: gl.constexpr = BLOCK_K // 64
    WARPS: gl.constexpr = (BLOCK_N if BLOCK_M < 64 else BLOCK_M) // 16 * ACROSS
    piece: gl.constexpr = ROWS * BLOCK_N * 4
    step_bytes: gl.constexpr = 2 * BLOCK_K * (BLOCK_M + BLOCK_N)
    tail = tail_address(TAIL)
    ready = tail + 16
    expect_bytes_of_each(ready, step_bytes, SLOTS)
    if SPLITS > 1:
        expect_bytes(tail, (SPLITS - 1) * piece)
    if POST_NORM:
        expect_bytes(tail + 8, N // BLOCK_N * ROWS * 8)
    if CLUSTER > 1:
        cluster_arrive()
    x_tiles, weight_tiles = ring_tiles(x_desc, weight_desc, SLOTS * BLOCKS, BLOCK_M, BLOCK_N)
    ring = ring_address()
    x_at = ring + first_tile(BLOCK_M, BLOCK_N, SLOTS * BLOCKS, True) * (128 * BLOCK_M)
    weight_at = ring + first_tile(BLOCK_N, BLOCK_M, SLOTS * BLOCKS, False) * (128 * BLOCK_N)
    if SHARE_ROWS > 1:
        cluster_wait()
    else:
        tl.debug_barrier()
    of_column = _every(SPLITS, SHARE_ROWS) << (part + SPLITS * SHARE_ROWS * across)
    of_row = _every(SPLITS * SHARE_ROWS, SHARE_COLUMNS) << (part + SPLITS * down)
    ask_for_tiles(
        weight_desc, col0, k0, weight_at, ready, down, of_column, parameter(WEIGHT),
        EARLY * BLOCKS, BLOCKS, SHARE_ROWS, asking_warps(BLOCK_N),
    )  # fmt: skip

    NARROW: gl.constexpr = BLOCK_M < 64
    layout: gl.constexpr = (
        narrow_layout(ROWS, BLOCK_N) if NARROW else rows_layout(BLOCK_M, BLOCK_N, SPLITS, ACROSS)
    )
    JOIN_EARLY: gl.constexpr = PARTS > 0 and BLOCK_M == 128 and SPLITS == 1
    PLACES: gl.constexpr = part_columns(PARTS)
    parts_layout: gl.constexpr = accumulator(PLACES, BLOCK_M) if JOIN_EARLY else layout
    own_row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    row = row0 + part * ROWS + own_row
    col = col0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    live = row < M
    at = row[:, None] * N + col[None, :]
    if HAS_BIAS:
        bias = gl.load(bias_ptr + col).to(gl.float32)
    if PARTS > 0:
        weight_sums = gl.load(weight_sums_ptr + col)
    if POST_NORM:
        norm_weight = gl.load(norm_weight_ptr + col)[None, :]
        norm_bias = gl.load(norm_bias_ptr + col)[None, :]
    if CLUSTER > 1 and SHARE_ROWS == 1:
        cluster_wait()
    wait_for_previous(PDL)
    ask_for_tiles(
        x_desc, row0, k0, x_at, ready, across, of_row, parameter(X), SLOTS * BLOCKS, BLOCKS,
        SHARE_COLUMNS, asking_warps(BLOCK_M),
    )  # fmt: skip
    if EARLY < SLOTS:
        ask_for_tiles(
            weight_desc, col0, k0 + EARLY * BLOCK_K, weight_at + EARLY * (128 * BLOCKS * BLOCK_N),
            ready + 8 * EARLY, down, of_column, parameter(WEIGHT), (SLOTS - EARLY) * BLOCKS, BLOCKS,
            SHARE_ROWS, 2,
        )  # fmt: skip
    if JOIN_EARLY:
        place = gl.arange(0, ROWS, gl.SliceLayout(1, parts_layout))
        place += row0 + part * ROWS
        means, squares = load_parts(
            norm_stats_ptr, place, place < M, M, PARTS, PLACES, parts_layout
        )
    elif PARTS > 0:
        means, squares = load_stats(norm_stats_ptr, row, live, M, PARTS)
    if HAS_RESIDUAL:
        residual = gl.load(residual_ptr + at, mask=live[:, None], other=0.0)

    LINES: gl.constexpr = BLOCK_N if NARROW else BLOCK_M
    ALONG: gl.constexpr = BLOCK_M if NARROW else BLOCK_N
    acc = gl.zeros([LINES, ALONG], gl.float32, accumulator(ALONG, LINES, ACROSS))
    for step in gl.static_range(STEPS):
        wait_arrivals(ready + 8 * (step % SLOTS), step // SLOTS % 2)
        acc = multiply_step(
            acc, x_tiles, weight_tiles, step % SLOTS, SLOTS, BLOCKS, BLOCK_M, BLOCK_N
        )
        if JOIN_EARLY and step == STEPS // 2:  # they have come, products are under way
            mean, rstd = join_parts(
                means, squares, eps, STEPS * BLOCK_K * SPLITS, PARTS, PLACES, parts_layout,
                gl.SliceLayout(1, layout),
            )  # fmt: skip
        if step >= 1 and step - 1 + SLOTS < STEPS:
            acc = warpgroup_mma_wait(BLOCKS, deps=(acc,))
            tl.debug_barrier()  # all warps have read the slot of the step before
            fill_again(
                x_desc, weight_desc, row0, col0, k0, x_at, weight_at, ready, step - 1 + SLOTS,
                SLOTS, BLOCKS, WARPS,
            )  # fmt: skip
    if PARTS > 0 and not JOIN_EARLY:
        mean, rstd = join_stats(means, squares, eps, STEPS * BLOCK_K * SPLITS, PARTS)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    y = acc
    if SPLITS > 1:
        sums = tail + HEAD
        if NARROW:
            send_narrow(acc, sums + part * piece, tail, BLOCK_M, SPLITS)
            tl.debug_barrier()  # a program's own sums count nowhere
            wait_bytes(tail)
            y = receive_narrow(sums, ROWS, BLOCK_N)
            for other in gl.static_range(1, SPLITS):
                y += receive_narrow(sums + other * piece, ROWS, BLOCK_N)
        else:
            send_rows(acc, sums + part * piece, tail, BLOCK_M, BLOCK_N, SPLITS)
            tl.debug_barrier()  # a program's own sums count nowhere
            wait_bytes(tail)
            y = receive_rows(sums, BLOCK_M, BLOCK_N, SPLITS)
            for other in gl.static_range(1, SPLITS):
                y += receive_rows(sums + other * piece, BLOCK_M, BLOCK_N, SPLITS)
    elif NARROW:
        y = gl.permute(acc, (1, 0))
    if NARROW:
        y = gl.convert_layout(y, layout)
    if PARTS > 0:
        y = (y - mean[:, None] * weight_sums[None, :]) * rstd[:, None]
    if HAS_BIAS:
        y += bias[None, :]
    if GELU:
        y = gelu(y)
    if POST_NORM:
        places = tail + HEAD + (SPLITS * piece if SPLITS > 1 else 0)
        mean, rstd = row_statistics(
            y, places, tail + 8, tile_col, part, own_row, eps, N, BLOCK_M, BLOCK_N, SPLITS,
        )  # fmt: skip
        y = (y - mean[:, None]) * rstd[:, None] * norm_weight + norm_bias
    if HAS_RESIDUAL:
        y += residual.to(gl.float32)
    stored = y.to(dtype)
    if NARROW or SPLITS > 1:
        gl.store(out_ptr + at, stored, mask=live[:, None])
    else:
        store_tile(out_ptr, stored, row0, col0, M, N, WARPS)
    if WRITE_STATS:
        y = stored.to(gl.float32)
        part_mean = gl.sum(y, 1) / BLOCK_N
        y -= part_mean[:, None]
        to = stats_out_ptr + tile_col * M + row
        gl.store(to, part_mean, mask=live)
        gl.store(to + N // BLOCK_N * M, gl.sum(y * y, 1), mask=live)
