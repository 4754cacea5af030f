"""A product of few rows whose weights wait in shared memory, K cut across a cluster's programs.

    out = residual + act(norm(x) @ weight.T + bias)         residual + norm(x @ weight.T + bias)

    x [M, K]   weight [N, K]   residual, out [M, N]   bias, weight_sums, norm weight and bias [N]
    norm_stats, stats_out [2, parts, M] fp32 (ops/linear/stats.py)

With 49 to 1,568 rows a product takes a microsecond of arithmetic. The rest is latency: the launch,
x's way from L2, steps that depend on each other. So a program asks for its tile of the weight
through the copy engine before it waits for the kernel in front (_triton/pdl.py); behind the wait x
comes the same way, all of it at once where the ring has a slot for every step. Steps that wait for
a slot are slow: rings of half the memory made whole models 4 to 20 % slower. Asking takes a warp 75
ns a copy, so a step has up to 256 channels, for whose four copies four warps ask at once.

Tensor cores take 64 lines of the first operand at least, 8 of the second. So tiles of 16 or 32 rows
are the product the other way round (narrow_exchange.py): fewer bytes of x to wait for, and more
threads to share what stands behind the product.

Where K is long, SPLITS programs share a tile, each multiplies its part of K, and all send all
their sums by distributed shared memory (exchange.py): one adds ``BLOCK_M / SPLITS`` rows of all, in
the order of the programs, with bias and residual. No sums go through memory, no second launch adds
them.

LayerNorm may stand behind the product, whose statistics the product that wrote x has left:

    norm(x) @ W.T = rstd * (x @ W.T - mean * W.sum(1))

V2's LayerNorm stands behind too, of the product's results: then a cluster holds all programs of its
rows, who tell each other their columns' statistics.

2 M N K FLOPs; L2 delivers ``M N K (1 / BLOCK_M + 1 / BLOCK_N) * 2`` bytes, half of them before the
wait, and programs send ``4 M N SPLITS`` to each other.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastswin._triton.cluster_memory import (
    cluster_arrive,
    cluster_wait,
    expect_bytes,
    joined_statistics,
    part_statistics,
    send_statistics,
    tail_address,
    wait_bytes,
)
from fastswin._triton.gluon_tiles import accumulator, buffers
from fastswin._triton.math import gelu
from fastswin._triton.pdl import launch_dependents, wait_for_previous
from fastswin._triton.row_statistics import joined_stats
from fastswin.ops.cluster_linear.exchange import (
    receive_rows,
    rows_layout,
    send_rows,
)
from fastswin.ops.cluster_linear.narrow_exchange import (
    narrow_layout,
    receive_narrow,
    send_narrow,
)


@gluon.jit
def _load_step(desc, tiles, ready, first, k0, STEP: gl.constexpr):
    """One operand of a step into its slot, whose barrier expects it."""
    slot: gl.constexpr = STEP % tiles.shape[0]
    k = k0 + STEP * desc.block_type.shape[1]
    tma.async_copy_global_to_shared(desc, [first, k], ready.index(slot), tiles.index(slot))


@gluon.jit
def _row_statistics(
    y, places, barrier, tile, part, row, eps, N: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Mean and 1 / deviation of whole rows, of which each program of a cluster has BLOCK_N columns.

    Programs with the same rows, one a tile, tell each other theirs at ``places`` of their memory.
    """
    ROWS: gl.constexpr = BLOCK_M // SPLITS
    TILES: gl.constexpr = N // BLOCK_N
    WARPS: gl.constexpr = BLOCK_M // 16 if SPLITS > BLOCK_M // 16 else SPLITS
    mean, deviations = part_statistics(y, BLOCK_N)
    for other in gl.static_range(TILES):
        send_statistics(
            mean, deviations, places + tile * (8 * ROWS), barrier, other * SPLITS + part, row, ROWS,
            WARPS,
        )  # fmt: skip
    wait_bytes(barrier)
    return joined_statistics(places, row, eps, BLOCK_N, TILES, 8 * ROWS)


@gluon.jit(do_not_specialize=["M"])
def _cluster_linear_kernel(
    out_ptr, x_desc, weight_desc, bias_ptr, residual_ptr, norm_stats_ptr, weight_sums_ptr,
    stats_out_ptr, norm_weight_ptr, norm_bias_ptr, M, eps,
    N: gl.constexpr, STEPS: gl.constexpr, SLOTS: gl.constexpr, SPLITS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GELU: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, PARTS: gl.constexpr, WRITE_STATS: gl.constexpr,
    POST_NORM: gl.constexpr, TAIL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program ``tile * SPLITS + part of K``, columns fastest.

    With PARTS rows are normalised behind the product, with POST_NORM its results are: then a
    cluster holds all tiles of a row.
    """
    launch_dependents(PDL)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    part = gl.program_id(0) % SPLITS
    tile = gl.program_id(0) // SPLITS
    row0 = tile // (N // BLOCK_N) * BLOCK_M
    col0 = tile % (N // BLOCK_N) * BLOCK_N
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    k0 = part * (STEPS * BLOCK_K)
    ROWS: gl.constexpr = BLOCK_M // SPLITS
    piece: gl.constexpr = ROWS * BLOCK_N * 4
    tail = 0
    if TAIL > 0:
        tail = tail_address(TAIL)
        if SPLITS > 1:
            expect_bytes(tail, SPLITS * piece)
        if POST_NORM:
            expect_bytes(tail + 8, N // BLOCK_N * ROWS * 8)
        cluster_arrive()
    x_tiles = buffers(x_desc, SLOTS)
    weight_tiles = buffers(weight_desc, SLOTS)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=1)
    fence_async_shared()
    step_bytes: gl.constexpr = x_desc.block_type.nbytes + weight_desc.block_type.nbytes
    for slot in gl.static_range(SLOTS):
        mbarrier.expect(ready.index(slot), step_bytes)
        _load_step(weight_desc, weight_tiles, ready, col0, k0, slot)

    NARROW: gl.constexpr = BLOCK_M < 64
    layout: gl.constexpr = (
        narrow_layout(ROWS, BLOCK_N) if NARROW else rows_layout(BLOCK_M, BLOCK_N, SPLITS)
    )
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
    if TAIL > 0:
        cluster_wait()
    wait_for_previous(PDL)
    for slot in gl.static_range(SLOTS):
        _load_step(x_desc, x_tiles, ready, row0, k0, slot)
    if PARTS > 0:
        mean, rstd = joined_stats(
            norm_stats_ptr, row, live, M, eps, STEPS * BLOCK_K * SPLITS, PARTS
        )
    if HAS_RESIDUAL:
        residual = gl.load(residual_ptr + at, mask=live[:, None], other=0.0)

    ACROSS: gl.constexpr = BLOCK_M if NARROW else BLOCK_N
    DOWN: gl.constexpr = BLOCK_N if NARROW else BLOCK_M
    acc = gl.zeros([DOWN, ACROSS], gl.float32, accumulator(ACROSS, DOWN))
    for step in gl.static_range(STEPS):
        mbarrier.wait(ready.index(step % SLOTS), step // SLOTS % 2)
        x, weight = x_tiles.index(step % SLOTS), weight_tiles.index(step % SLOTS)
        if NARROW:
            acc = warpgroup_mma(weight, x.permute((1, 0)), acc, is_async=True)
        else:
            acc = warpgroup_mma(x, weight.permute((1, 0)), acc, is_async=True)
        if step >= 1 and step - 1 + SLOTS < STEPS:
            acc = warpgroup_mma_wait(1, deps=(acc,))
            tl.debug_barrier()  # all warps have read the slot of the step before
            mbarrier.expect(ready.index((step - 1) % SLOTS), step_bytes)
            _load_step(weight_desc, weight_tiles, ready, col0, k0, step - 1 + SLOTS)
            _load_step(x_desc, x_tiles, ready, row0, k0, step - 1 + SLOTS)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    y = acc
    if SPLITS > 1:
        sums = tail + 128
        if NARROW:
            send_narrow(acc, sums + part * piece, tail, BLOCK_M, SPLITS)
            wait_bytes(tail)
            y = receive_narrow(sums, ROWS, BLOCK_N)
            for other in gl.static_range(1, SPLITS):
                y += receive_narrow(sums + other * piece, ROWS, BLOCK_N)
        else:
            send_rows(acc, sums + part * piece, tail, BLOCK_M, BLOCK_N, SPLITS)
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
        places = tail + 128 + (SPLITS * piece if SPLITS > 1 else 0)
        mean, rstd = _row_statistics(
            y, places, tail + 8, tile % (N // BLOCK_N), part, own_row, eps, N, BLOCK_M, BLOCK_N,
            SPLITS,
        )  # fmt: skip
        y = (y - mean[:, None]) * rstd[:, None] * norm_weight + norm_bias
    if HAS_RESIDUAL:
        y += residual.to(gl.float32)
    stored = y.to(dtype)
    gl.store(out_ptr + at, stored, mask=live[:, None])
    if WRITE_STATS:
        y = stored.to(gl.float32)
        part_mean = gl.sum(y, 1) / BLOCK_N
        y -= part_mean[:, None]
        to = stats_out_ptr + col0 // BLOCK_N * M + row
        gl.store(to, part_mean, mask=live)
        gl.store(to + N // BLOCK_N * M, gl.sum(y * y, 1), mask=live)
