"""The MLP half of a block in one launch, hidden units shared by a cluster's programs, on Hopper.

    V1   out = x + fc2(gelu(fc1(norm(x))))      V2   out = x + norm(fc2(gelu(fc1(x))))

    x, out [M, C]   tiles [P * tiles * 128, 64] (packing.py)   fc1_sums, fc1_bias [4C]
    fc2_bias, norm weight and bias [C] fp32   offset [C] 16-bit
    stats_out [2, C / 128, M] fp32 (ops/linear/stats.py)

With 1,568 rows of 384 channels LayerNorm, fc1 and fc2 took 17 us for 4 us of arithmetic: three
launches, hidden rows through memory, tiles that leave a third of the card idle. Here P programs
share BLOCK_M rows. Each has ``4C / P`` hidden units, which never leave its registers:

    h = gelu(rstd * (x @ W1.T - mean * W1.sum(1)) + b1)     sums = h @ W2.T  [BLOCK_M, C]

and every program adds up ``BLOCK_M / P`` rows of all sums, with bias and residual. Rows are whole
there, so V2's LayerNorm and the next one's statistics are its own affair. Sums cross in x's 16-bit
type through distributed shared memory (exchange.py): P roundings of parts whose squares add up to
the result's cost about as much as one rounding of the result.

Statistics of V1's rows: each program computes those of its ``BLOCK_M / P`` rows from memory, beside
the first products, and sends them to all; fc1's sums wait for them. Such that a product in front
had left took as long and its time as well. Where x's writer has left a bias to its readers, V1's x
is ``x + offset`` and fc2's bias holds that offset for the residual.

Weights come through one ring of 16 KB tiles, fc1's then fc2's without a gap. Asking for one takes a
warp 75 ns, so warps of their own do it, those that fit the ring before the kernel in front has
ended. The warps that multiply say by barriers that a slot is empty, and nowhere else meet within a
program: one group's GELU and exchange may stand beside the other's products (a second group that
began some tiles behind the first gained nothing). x goes through the tensor cores once: fc1's
first 128 units and the others are multiplied side by side. GELU of 64 units at a time stands where
the product of the 64 before is under way. Sums of 128 columns are sent while the next are
multiplied, and added up while the ones after those are.

The cluster has one barrier, of all its threads, those that ask for tiles too, in one or two phases.
The first, V1's, says that barriers are made and that 64 columns of x are read, in whose place
statistics come. The other says that x and statistics are read, in whose
place sums come.

16 M C C FLOPs; to each multiprocessor ``2 BLOCK_M C + 16 C C / P`` bytes from L2 and
``2 BLOCK_M C`` from its neighbours. Counted for 1,568 rows of 384, BLOCK_M 128, P 8, so 104
programs: 5.2 us of tensor cores, 4.6 us of L2, 2.8 us of exchange, two thirds of it behind
products.
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
    arrive_by_warp,
    cluster_arrive_relaxed,
    cluster_wait,
    expect_bytes,
    expect_bytes_of_each,
    fetch_bytes,
    make_barriers,
    receive_statistics,
    tail_address,
    wait_arrivals,
    wait_bytes,
)
from fastswin._triton.gluon_tiles import accumulator, buffers
from fastswin._triton.math import gelu
from fastswin._triton.pdl import wait_for_previous
from fastswin.ops.cluster_mlp import config
from fastswin.ops.cluster_mlp.exchange import (
    computed_here,
    operand,
    rows_layout,
    send_rows,
    stage_rows,
    take_offset,
    take_rows,
)
from fastswin.ops.cluster_mlp.rows import (
    PART,
    added_sums,
    finish_part,
    load_beside,
    load_own_rows,
    row_statistics,
    send_own_statistics,
    store_part,
)

#: Steps of channels and hidden units.
STEP = gl.constexpr(64)

#: Bytes of barriers at the beginning of the tail (config.py). By number: sums of each 128 columns,
#: then statistics, the offset, and slots that are empty.
BARRIERS = gl.constexpr(config.TAIL_BARRIERS)

#: Registers of a thread that asks for tiles; the others get the rest.
REGISTERS = gl.constexpr(24)


@gluon.jit
def _load_tile(desc, ring, ready, first, TILE: gl.constexpr):
    """A weight tile into its slot; its own barrier expects it."""
    mbarrier.expect(ready[TILE].index(0), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(
        desc, [first + TILE * PART, 0], ready[TILE].index(0), ring.index(TILE % ring.shape[0])
    )


@gluon.jit
def _ask_for_tiles(desc, ring, ready, empty, first, TILES: gl.constexpr, TWO_PHASES: gl.constexpr):
    """The warps that ask for weights: all tiles in order, each once its slot is empty.

    Four, since the compiler adds idle ones up to as many, for which the cluster's barrier would
    wait in vain.
    """
    SLOTS: gl.constexpr = ring.shape[0]
    # the first phase stands behind some more tiles, which need not wait for other programs
    BEHIND: gl.constexpr = SLOTS + 2 if SLOTS + 2 < TILES else TILES - 1
    cluster_arrive_relaxed()
    for tile in gl.static_range(TILES):
        if tile >= SLOTS:
            wait_arrivals(empty + 8 * (tile % SLOTS), (tile // SLOTS + 1) % 2)
        _load_tile(desc, ring, ready, first, tile)
        if TWO_PHASES and tile == BEHIND:
            cluster_wait()
            cluster_arrive_relaxed()
    cluster_wait()


@gluon.jit
def _tile(ring, ready, TILE: gl.constexpr):
    """A weight tile once it has come."""
    mbarrier.wait(ready[TILE].index(0), 0)
    return ring.index(TILE % ring.shape[0])


@gluon.jit
def _release(empty, TILE: gl.constexpr, SLOTS: gl.constexpr, TILES: gl.constexpr):
    """This warp has multiplied a tile, whose slot another is to fill."""
    if TILE >= 0 and TILE + SLOTS < TILES:
        arrive_by_warp(empty + 8 * (TILE % SLOTS))


@gluon.jit
def _rows(
    places, dtype: gl.constexpr, COLUMN: gl.constexpr, OUTSTANDING: gl.constexpr,
    OFFSET: gl.constexpr, C: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """64 columns of x, plus what its writer has left to its readers, as a first operand."""
    x = take_rows(places, dtype, COLUMN, OUTSTANDING, BLOCK_M)
    if OFFSET:
        x += take_offset(places + 2 * BLOCK_M * C, dtype, COLUMN, BLOCK_M)
    return x


@gluon.jit
def _halves(tile, LAYOUT: gl.constexpr):
    """Left and right half of a tile's columns; each thread keeps what it holds."""
    rows: gl.constexpr = tile.shape[0]
    half: gl.constexpr = tile.shape[1] // 2
    left, right = tile.reshape((rows, 2, half)).permute((0, 2, 1)).split()
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    return left, gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def _parts(tile, LAYOUT: gl.constexpr):
    """A tile as one or two of 64 columns."""
    if tile.shape[1] == STEP:
        return (tile,)
    else:
        return _halves(tile, LAYOUT)


@gluon.jit
def _load_vector(ptr, PARTS: gl.constexpr, WARPS: gl.constexpr):
    """A program's part of a vector on its way into registers, 64 values at a time."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, WARPS], [1, 0])
    at = gl.arange(0, STEP, gl.SliceLayout(0, layout))
    parts = ()
    for part in gl.static_range(PARTS):
        parts = parts + (gl.load(ptr + part * STEP + at)[None, :],)  # noqa: RUF005
    return parts


@gluon.jit
def _keep_vector(parts, PARTS: gl.constexpr):
    """What :func:`_load_vector` has loaded in shared memory."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    kept = gl.allocate_shared_memory(gl.float32, [PARTS, 1, STEP], flat)
    for part in gl.static_range(PARTS):
        kept.index(part).store(parts[part])
    return kept


@gluon.jit
def _activated(
    h, mean, rstd, sums, bias, part, dtype: gl.constexpr, NORM: gl.constexpr, BLOCK_M: gl.constexpr
):
    """64 hidden units of all rows: the norm that stands behind fc1, its bias, GELU."""
    layout: gl.constexpr = accumulator(STEP, BLOCK_M)
    if NORM:
        h = (h - mean[:, None] * sums.index(part).load(layout)) * rstd[:, None]
    h = gelu(h + bias.index(part).load(layout))
    return gl.convert_layout(computed_here(h.to(dtype)), operand(BLOCK_M), assert_trivial=True)


@gluon.jit
def _multiply_rows(
    out_ptr, x_ptr, ring, ready, tail, fc1_sums_ptr, fc1_bias_ptr, fc2_bias_ptr, stats_out_ptr,
    norm_weight_ptr, norm_bias_ptr, offset_ptr, program, row0, M, eps,
    C: gl.constexpr, P: gl.constexpr, BLOCK_M: gl.constexpr, OFFSET: gl.constexpr,
    WRITE_STATS: gl.constexpr, POST_NORM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The warps that multiply, one for 16 rows."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    SLOTS: gl.constexpr = ring.shape[0]
    HIDDEN: gl.constexpr = 4 * C // P
    OTHERS: gl.constexpr = HIDDEN - PART  # hidden units behind the first 128: 0, 64, 128
    WIDTH: gl.constexpr = OTHERS if OTHERS > 0 else STEP
    UNITS: gl.constexpr = HIDDEN // STEP
    COLUMNS: gl.constexpr = C // PART
    STEPS: gl.constexpr = C // STEP
    BOTH: gl.constexpr = PART // WIDTH if OTHERS > 0 else 1  # steps of channels in a tile of others
    EACH: gl.constexpr = BOTH + 1 if OTHERS > 0 else 1  # tiles of as many steps
    FC2: gl.constexpr = STEPS // BOTH * EACH
    TILES: gl.constexpr = FC2 + COLUMNS * UNITS
    ROWS: gl.constexpr = BLOCK_M // P
    piece: gl.constexpr = ROWS * PART * 2
    NORM: gl.constexpr = not POST_NORM
    received = tail + 8 * COLUMNS
    empty = tail + 8 * (COLUMNS + 2)
    places = tail + BARRIERS

    biases = _load_vector(fc1_bias_ptr + program * HIDDEN, UNITS, BLOCK_M // 16)
    weight_sums = biases
    if NORM:
        weight_sums = _load_vector(fc1_sums_ptr + program * HIDDEN, UNITS, BLOCK_M // 16)
    half: gl.constexpr = accumulator(STEP, BLOCK_M)
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, half))
    mean = gl.zeros_like(row).to(gl.float32)
    rstd = mean
    wait_for_previous(PDL)
    stage_rows(x_ptr, row0, M, places, C, BLOCK_M)
    if NORM:
        own_rows = load_own_rows(x_ptr, offset_ptr, row0 + program * ROWS, M, C, P, BLOCK_M, OFFSET)
    bias = _keep_vector(biases, UNITS)
    sums = _keep_vector(weight_sums, UNITS) if NORM else bias
    tl.debug_barrier()  # the last of this program alone: vectors are there
    if OFFSET:
        wait_bytes(tail + 8 * (COLUMNS + 1))
    x0 = _rows(places, dtype, 0, STEPS - 1, OFFSET, C, BLOCK_M)
    if NORM:
        cluster_arrive_relaxed()

    ha = gl.zeros([BLOCK_M, PART], gl.float32, accumulator(PART, BLOCK_M))
    if OTHERS > 0:
        hb = gl.zeros([BLOCK_M, WIDTH], gl.float32, accumulator(WIDTH, BLOCK_M))
    for group in gl.static_range(STEPS // BOTH):
        x = ()
        for more in gl.static_range(BOTH):
            if group + more == 0:
                x = x + (x0,)  # noqa: RUF005
            else:
                x = x + (_rows(  # noqa: RUF005
                    places, dtype, BOTH * group + more, STEPS - 1 - (BOTH * group + more), OFFSET,
                    C, BLOCK_M,
                ),)  # fmt: skip
            weight = _tile(ring, ready, EACH * group + more).permute((1, 0))
            ha = warpgroup_mma(x[more], weight, ha, is_async=True)
            if group + more > 0:
                if OTHERS > 0 and group > 0:
                    ha, hb = warpgroup_mma_wait(1, deps=(ha, hb))
                else:
                    ha = warpgroup_mma_wait(1, deps=(ha,))
                _release(empty, EACH * group + more - 1, SLOTS, TILES)
        if OTHERS > 0:
            tile = _tile(ring, ready, EACH * group + BOTH)
            for more in gl.static_range(BOTH):
                weight = tile.slice(more * WIDTH, WIDTH) if BOTH > 1 else tile
                hb = warpgroup_mma(x[more], weight.permute((1, 0)), hb, is_async=True)
            if group < STEPS // BOTH - 1:
                ha, hb = warpgroup_mma_wait(BOTH, deps=(ha, hb))
                _release(empty, EACH * group + BOTH - 1, SLOTS, TILES)
        if NORM:
            if group == 0:
                own_mean, own_rstd = row_statistics(own_rows, eps, C)
            elif group == 1:
                send_own_statistics(own_mean, own_rstd, places, received, program, P, BLOCK_M)
    if NORM:
        wait_bytes(received)
        mean, rstd = receive_statistics(places, row)
    if OTHERS > 0:
        ha, hb = warpgroup_mma_wait(BOTH, deps=(ha, hb))
        _release(empty, FC2 - 2, SLOTS, TILES)
    else:
        ha = warpgroup_mma_wait(0, deps=(ha,))
        _release(empty, FC2 - 1, SLOTS, TILES)
    cluster_arrive_relaxed()
    units = _halves(ha, half)
    h = (_activated(units[0], mean, rstd, sums, bias, 0, dtype, NORM, BLOCK_M),)
    if OTHERS > 0:
        hb = warpgroup_mma_wait(0, deps=(hb,))
        _release(empty, FC2 - 1, SLOTS, TILES)
        units = units + _parts(hb, half)

    layout: gl.constexpr = rows_layout(BLOCK_M, P)
    own = row0 + program * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    col = gl.arange(0, PART, gl.SliceLayout(0, layout))
    live = own < M
    at = own[:, None] * C + col[None, :]
    whole = ()
    beside = ()
    for part in gl.static_range(COLUMNS):
        acc = gl.zeros([BLOCK_M, PART], gl.float32, accumulator(PART, BLOCK_M))
        for unit in gl.static_range(UNITS):
            weight = _tile(ring, ready, FC2 + part * UNITS + unit).permute((1, 0))
            acc = warpgroup_mma(h[unit], weight, acc, is_async=True)
            if unit == 0 and part > 0:
                whole, acc = warpgroup_mma_wait(1, deps=(whole, acc))
                _release(empty, FC2 + part * UNITS + unit - 1, SLOTS, TILES)
                if part == 1:
                    cluster_wait()
                send_rows(
                    whole.to(dtype), places + (part - 1) * (P * piece) + program * piece,
                    tail + 8 * (part - 1), BLOCK_M, P,
                )  # fmt: skip
                if not POST_NORM and part >= 2:
                    beside = load_beside(x_ptr, fc2_bias_ptr, at, live, col, part - 2)
            elif unit > 0:
                if not POST_NORM and part >= 2 and unit == UNITS - 1:
                    finish_part(
                        beside, places + (part - 2) * (P * piece), tail + 8 * (part - 2), out_ptr,
                        stats_out_ptr, at, own, live, M, part - 2, dtype, COLUMNS, WRITE_STATS,
                        BLOCK_M, P,
                    )  # fmt: skip
                acc = warpgroup_mma_wait(1, deps=(acc,))
                _release(empty, FC2 + part * UNITS + unit - 1, SLOTS, TILES)
            if part == 0 and unit + 1 < UNITS:  # the next units
                h = h + (_activated(  # noqa: RUF005
                    units[unit + 1], mean, rstd, sums, bias, unit + 1, dtype, NORM, BLOCK_M,
                ),)  # fmt: skip
        whole = acc
    rest = ()  # what is added to columns that are not finished: all, or the last two parts
    LEFT: gl.constexpr = COLUMNS if POST_NORM else 2
    for part in gl.static_range(COLUMNS - LEFT, COLUMNS):
        rest = rest + (load_beside(x_ptr, fc2_bias_ptr, at, live, col, part),)  # noqa: RUF005
    whole = warpgroup_mma_wait(0, deps=(whole,))
    send_rows(
        whole.to(dtype), places + (COLUMNS - 1) * (P * piece) + program * piece,
        tail + 8 * (COLUMNS - 1), BLOCK_M, P,
    )  # fmt: skip

    if POST_NORM:
        y = ()
        for part in gl.static_range(COLUMNS):
            wait_bytes(tail + 8 * part)
            found = added_sums(places + part * (P * piece), rest[part][0], dtype, BLOCK_M, P)
            y = y + (found,)  # noqa: RUF005
        total = gl.zeros_like(y[COLUMNS - 1])
        for part in gl.static_range(COLUMNS):
            total += y[part]
        row_mean = gl.sum(total, 1) / C
        deviations = gl.zeros_like(total)
        for part in gl.static_range(COLUMNS):
            apart = y[part] - row_mean[:, None]
            deviations += apart * apart
        row_rstd = gl.rsqrt(gl.sum(deviations, 1) / C + eps)
        for part in gl.static_range(COLUMNS):
            weight = gl.load(norm_weight_ptr + part * PART + col)[None, :]
            found = (y[part] - row_mean[:, None]) * row_rstd[:, None] * weight
            found += gl.load(norm_bias_ptr + part * PART + col)[None, :]
            store_part(
                found, rest[part][1], out_ptr + part * PART, stats_out_ptr, at, own, live, M,
                part, COLUMNS, WRITE_STATS,
            )  # fmt: skip
    else:
        for part in gl.static_range(COLUMNS - 2, COLUMNS):
            finish_part(
                rest[part - COLUMNS + 2], places + part * (P * piece), tail + 8 * part, out_ptr,
                stats_out_ptr, at, own, live, M, part, dtype, COLUMNS, WRITE_STATS, BLOCK_M, P,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["M"])
def _cluster_mlp_kernel(
    out_ptr, x_ptr, tiles_desc, fc1_sums_ptr, fc1_bias_ptr, fc2_bias_ptr, stats_out_ptr,
    norm_weight_ptr, norm_bias_ptr, offset_ptr, M, eps,
    C: gl.constexpr, P: gl.constexpr, BLOCK_M: gl.constexpr, SLOTS: gl.constexpr,
    OFFSET: gl.constexpr, WRITE_STATS: gl.constexpr, POST_NORM: gl.constexpr, TAIL: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Program ``row tile * P + part of the hidden units``; ``out`` may be ``x``.

    The launch's own warps multiply, four more ask for weights.
    """
    COLUMNS: gl.constexpr = C // PART
    TILES: gl.constexpr = 8 * C * C // P // (PART * STEP)
    program = gl.program_id(0) % P
    row0 = gl.program_id(0) // P * BLOCK_M
    tail = tail_address(TAIL)
    if OFFSET:
        expect_bytes(tail + 8 * (COLUMNS + 1), 2 * C)
        fetch_bytes(offset_ptr, tail + BARRIERS + 2 * BLOCK_M * C, tail + 8 * (COLUMNS + 1), 2 * C)
    make_barriers(tail + 8 * (COLUMNS + 2), BLOCK_M // 16, SLOTS)
    if not POST_NORM:
        expect_bytes(tail + 8 * COLUMNS, 8 * BLOCK_M)
    expect_bytes_of_each(tail, BLOCK_M * PART * 2, COLUMNS)
    ring = buffers(tiles_desc, SLOTS)
    # one barrier a tile: where one of a slot is waited for again, the compiler synchronises
    ready = ()
    for _tile_number in gl.static_range(TILES):
        barrier = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(barrier.index(0), count=1)
        ready = ready + (barrier,)  # noqa: RUF005
    fence_async_shared()
    tl.debug_barrier()
    gl.warp_specialize(
        [
            (_multiply_rows, (
                out_ptr, x_ptr, ring, ready, tail, fc1_sums_ptr, fc1_bias_ptr, fc2_bias_ptr,
                stats_out_ptr, norm_weight_ptr, norm_bias_ptr, offset_ptr, program, row0, M, eps,
                C, P, BLOCK_M, OFFSET, WRITE_STATS, POST_NORM, PDL,
            )),
            (_ask_for_tiles, (
                tiles_desc, ring, ready, tail + 8 * (COLUMNS + 2), program * (TILES * PART), TILES,
                not POST_NORM,
            )),
        ],
        [4], [REGISTERS],
    )  # fmt: skip
