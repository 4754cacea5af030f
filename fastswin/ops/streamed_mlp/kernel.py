"""The MLP half of a block on Hopper: rows stay on a multiprocessor, weights stream past them.

    V1   out = x' + fc2(gelu(fc1(norm(x'))))          x' = x + offset
    V2   out = x' + norm(fc2(gelu(fc1(x')))) * weight + bias

    x, out [M, C]   chunks [P * 2 steps * C, 64]   vectors [P, values] fp32 (packing.py)

A stage of 192 channels has 590 KB of MLP weights: too many for one multiprocessor to keep, few
enough to stream from L2 for every 192 rows, in the time of their products. Launched by parts, its
hidden rows go through memory and back, four fifths of all bytes. Here a program has 64 rows for
each of its warp groups. 64 hidden units at a time

    h = x @ W1.T + b1     y += gelu(h) @ W2.T

h lives in registers only, y ``[64, C]`` as well. The normalised rows are first operands in shared
memory, in the place of x; registers are full. x itself is asked for again once fc1 is done, into
the same place, as residual. A warp of its own asks for chunks, fc1's of the next step before fc2's
of this one, and groups say by barriers that they have multiplied one. Where rows are too few for
all multiprocessors, two programs share 128 rows, each with half of the hidden units for both
groups; then each finishes one group's rows with the other's sums, which cross in x's type
(exchange.py).

16 M C C FLOPs; 2 M C values to and from memory; 8 C C values from L2 for each program, of two for
both. Counted for 25,088 rows of 192, three groups: 131 programs, so one round: products 16 us at
the full rate, GELU's instructions 7 beside them, L2 at 4 TB/s.
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
    cluster_wait,
    expect_bytes,
    tail_address,
    wait_bytes,
)
from fastswin._triton.gluon_rows import from_row, normalized, row_layout
from fastswin._triton.gluon_tiles import accumulator, buffers
from fastswin._triton.math import gelu_of_half
from fastswin._triton.pdl import launch_dependents, wait_for_previous
from fastswin.ops.cluster_mlp.exchange import arrive_with_rows_read
from fastswin.ops.streamed_mlp import config
from fastswin.ops.streamed_mlp.exchange import PART_BYTES, receive_part, send_part

#: Rows of a group, columns of a tile, hidden units of a step.
STEP = gl.constexpr(config.STEP)

#: Bytes of a tail before the sums.
BARRIER = gl.constexpr(config.TAIL_BARRIER)

#: Registers of a thread that asks for chunks.
LOADER_REGISTERS = gl.constexpr(config.LOADER_REGISTERS)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers of so many arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def _ask_for_chunks(
    desc, ring, full, used, first, CHUNKS: gl.constexpr, SLOTS: gl.constexpr, TILES: gl.constexpr,
    P: gl.constexpr,
):  # fmt: skip
    """Chunks in order, each once its slot is empty; weights wait for no kernel in front."""
    if P > 1:
        arrive_with_rows_read()
    for chunk in range(CHUNKS):
        slot = chunk % SLOTS
        mbarrier.wait(used.index(slot), (chunk // SLOTS & 1) ^ 1)
        ready = full.index(slot)
        mbarrier.expect(ready, TILES * desc.block_type.nbytes)
        for tile in gl.static_range(TILES):
            tma.async_copy_global_to_shared(
                desc, [first + (chunk * TILES + tile) * STEP, 0], ready,
                ring.index(slot * TILES + tile),
            )  # fmt: skip
    if P > 1:
        cluster_wait()


@gluon.jit
def _ask_for_rows(desc, tiles, ready, row, GROUP: gl.constexpr, TILES: gl.constexpr):
    """A group's rows into its tiles."""
    mbarrier.expect(ready, TILES * desc.block_type.nbytes)
    for tile in gl.static_range(TILES):
        tma.async_copy_global_to_shared(
            desc, [row, tile * STEP], ready, tiles.index(GROUP * TILES + tile)
        )


@gluon.jit
def _rows(tiles, offset_ptr, GROUP: gl.constexpr, TILES: gl.constexpr, HAS_OFFSET: gl.constexpr):
    """A group's rows in fp32, plus the offset, tile by tile."""
    acc: gl.constexpr = accumulator(STEP)
    rows = ()
    for tile in gl.static_range(TILES):
        x = tiles.index(GROUP * TILES + tile).load(acc).to(gl.float32)
        if HAS_OFFSET:
            at = tile * STEP + gl.arange(0, STEP, gl.SliceLayout(0, acc))
            x += gl.load(offset_ptr + at).to(gl.float32)[None, :]
        rows += (x,)
    return rows


@gluon.jit
def _keep(rows, tiles, dtype: gl.constexpr, GROUP: gl.constexpr):
    """Rows into their tiles, where copies and products find them."""
    for tile in gl.static_range(len(rows)):
        tiles.index(GROUP * len(rows) + tile).store(rows[tile].to(dtype))
    fence_async_shared()
    tl.debug_barrier()  # all warps of the group have


@gluon.jit
def _ready(sums):
    """Sums in registers of their own; nothing may be under way.

    Values that the compiler wrote there between products under way would make the assembler wait
    for each of those.
    """
    return warpgroup_mma_wait(0, deps=sums)


@gluon.jit
def _expand(
    h, tiles, ring, full, chunk, GROUP: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr
):
    """Half of 64 hidden units on top of half their bias, before GELU, under way."""
    slot = chunk % SLOTS
    mbarrier.wait(full.index(slot), chunk // SLOTS & 1)
    for tile in gl.static_range(TILES):
        weight = ring.index(slot * TILES + tile).permute((1, 0))
        h = warpgroup_mma(tiles.index(GROUP * TILES + tile), weight, h, is_async=True)
    return h


@gluon.jit
def _activated(h, dtype: gl.constexpr):
    """GELU of twice h as a first operand."""
    layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(STEP), 2)
    return gl.convert_layout(gelu_of_half(h).to(dtype), layout, assert_trivial=True)


@gluon.jit
def _shrink(h, y, ring, full, chunk, SLOTS: gl.constexpr):
    """Sums plus what 64 hidden units add, under way."""
    slot = chunk % SLOTS
    mbarrier.wait(full.index(slot), chunk // SLOTS & 1)
    more = ()
    for tile in gl.static_range(len(y)):
        weight = ring.index(slot * len(y) + tile).permute((1, 0))
        more += (warpgroup_mma(h, weight, y[tile], is_async=True),)
    return more


@gluon.jit
def _release(used, chunk, SLOTS: gl.constexpr):
    """This group has multiplied a chunk."""
    mbarrier.arrive(used.index(chunk % SLOTS), count=1)


@gluon.jit
def _wait_for_turn(turns, turn, GROUP: gl.constexpr, ORDER: gl.constexpr):
    """Until a group's turn of this number; the first group has its first at once."""
    if ORDER:
        mbarrier.wait(turns.index(GROUP), (turn & 1) ^ (1 if GROUP == 0 else 0))


@gluon.jit
def _pass_turn(turns, GROUP: gl.constexpr, GROUPS: gl.constexpr, NOW: gl.constexpr):
    """The next group's products may begin."""
    if NOW:
        mbarrier.arrive(turns.index((GROUP + 1) % GROUPS), count=1)


@gluon.jit
def _finish(
    y, x_tiles, out_desc, vectors, offset_ptr, row, eps, dtype: gl.constexpr, GROUP: gl.constexpr,
    FIRST: gl.constexpr, POST_NORM: gl.constexpr, HAS_OFFSET: gl.constexpr,
):  # fmt: skip
    """V2's norm, the residual, and out to memory; FIRST part of the vectors is fc2's bias."""
    TILES: gl.constexpr = len(y)
    if POST_NORM:
        y = normalized(y, eps, TILES * STEP)
        scaled = ()
        for tile in gl.static_range(TILES):
            weight = from_row(vectors, FIRST + TILES + tile, STEP)
            scaled += (y[tile] * weight + from_row(vectors, FIRST + 2 * TILES + tile, STEP),)
        y = scaled
    x = _rows(x_tiles, offset_ptr, GROUP, TILES, HAS_OFFSET)
    result = ()
    for tile in gl.static_range(TILES):
        result += (y[tile] + x[tile],)
    _keep(result, x_tiles, dtype, GROUP)
    for tile in gl.static_range(TILES):
        tma.async_copy_shared_to_global(
            out_desc, [row, tile * STEP], x_tiles.index(GROUP * TILES + tile)
        )
    tma.store_wait(0)


@gluon.jit
def _multiply(
    x_desc, out_desc, offset_ptr, ring, full, used, x_tiles, x_ready, turns, vectors, tail, program,
    row0, eps, GROUP: gl.constexpr, GROUPS: gl.constexpr, C: gl.constexpr, STEPS: gl.constexpr,
    SLOTS: gl.constexpr, P: gl.constexpr, TOGETHER: gl.constexpr, ORDER: gl.constexpr,
    POST_NORM: gl.constexpr, HAS_OFFSET: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warp group's 64 rows."""
    dtype: gl.constexpr = out_desc.dtype
    TILES: gl.constexpr = C // STEP
    row = row0 + GROUP * STEP
    ready = x_ready.index(GROUP)
    by_tile = vectors._reinterpret(gl.float32, [vectors.shape[0] // STEP, 1, STEP], row_layout())
    if P > 1:
        arrive_with_rows_read()
    wait_for_previous(PDL)
    _ask_for_rows(x_desc, x_tiles, ready, row, GROUP, TILES)
    y = ()
    for tile in gl.static_range(TILES):
        bias = from_row(by_tile, STEPS + tile, STEP)
        if P > 1:  # the group whose rows another program finishes adds none
            bias = gl.where(program == GROUP, bias, 0.0)
        y += (bias,)
    mbarrier.wait(ready, 0)
    if not POST_NORM or HAS_OFFSET:
        x = _rows(x_tiles, offset_ptr, GROUP, TILES, HAS_OFFSET)
        if not POST_NORM:
            x = normalized(x, eps, C)
        _keep(x, x_tiles, dtype, GROUP)
    begun = _ready((from_row(by_tile, 0, STEP),) + y)  # noqa: RUF005
    _wait_for_turn(turns, 0, GROUP, ORDER)
    h = _expand(begun[0], x_tiles, ring, full, 0, GROUP, TILES, SLOTS)
    _pass_turn(turns, GROUP, GROUPS, ORDER == 1)
    h = warpgroup_mma_wait(0, deps=(h,))
    _pass_turn(turns, GROUP, GROUPS, ORDER == 2)
    _release(used, 0, SLOTS)
    y = begun[1:]
    for step in range(STEPS - 1):
        units = _activated(h, dtype)
        _wait_for_turn(turns, step + 1, GROUP, ORDER)
        if TOGETHER:
            begun = _ready((from_row(by_tile, step + 1, STEP),) + y)  # noqa: RUF005
            y = _shrink(units, begun[1:], ring, full, 2 * step + 2, SLOTS)
            h = _expand(begun[0], x_tiles, ring, full, 2 * step + 1, GROUP, TILES, SLOTS)
            _pass_turn(turns, GROUP, GROUPS, ORDER == 1)
            done = warpgroup_mma_wait(0, deps=(h,) + y)  # noqa: RUF005
            _release(used, 2 * step + 1, SLOTS)
            _release(used, 2 * step + 2, SLOTS)
            h = done[0]
            y = done[1:]
        else:
            y = _shrink(units, y, ring, full, 2 * step + 2, SLOTS)
            y = warpgroup_mma_wait(0, deps=y)
            _release(used, 2 * step + 2, SLOTS)
            h = _ready((from_row(by_tile, step + 1, STEP),))
            h = _expand(h, x_tiles, ring, full, 2 * step + 1, GROUP, TILES, SLOTS)
            _pass_turn(turns, GROUP, GROUPS, ORDER == 1)
            h = warpgroup_mma_wait(0, deps=(h,))
            _release(used, 2 * step + 1, SLOTS)
        _pass_turn(turns, GROUP, GROUPS, ORDER == 2)
    tl.debug_barrier()  # fc1 of all the group's warps is done
    if P == 1 or program == GROUP:  # out may be x: these rows are this group's, and not yet written
        _ask_for_rows(x_desc, x_tiles, ready, row, GROUP, TILES)
    units = _activated(h, dtype)
    _wait_for_turn(turns, STEPS, GROUP, ORDER)
    y = _shrink(units, y, ring, full, 2 * STEPS - 1, SLOTS)
    _pass_turn(turns, GROUP, GROUPS, ORDER > 0)
    y = warpgroup_mma_wait(0, deps=y)
    if P > 1:
        cluster_wait()
        if program == GROUP:
            wait_bytes(tail)
            sums = ()
            for tile in gl.static_range(TILES):
                sums += (y[tile] + receive_part(tail + BARRIER + tile * PART_BYTES, dtype),)
            mbarrier.wait(ready, 1)
            _finish(
                sums, x_tiles, out_desc, by_tile, offset_ptr, row, eps, dtype, GROUP, STEPS,
                POST_NORM, HAS_OFFSET,
            )  # fmt: skip
        else:
            for tile in gl.static_range(TILES):
                send_part(
                    y[tile].to(dtype), tail + BARRIER + tile * PART_BYTES, tail, 1 - program
                )  # fmt: skip
    else:
        mbarrier.wait(ready, 1)
        _finish(
            y, x_tiles, out_desc, by_tile, offset_ptr, row, eps, dtype, GROUP, STEPS, POST_NORM,
            HAS_OFFSET,
        )  # fmt: skip


@gluon.jit
def _streamed_mlp_kernel(
    vectors_ptr, offset_ptr, x_desc, chunks_desc, out_desc, eps,
    C: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr, P: gl.constexpr,
    SLOTS: gl.constexpr, COUNT: gl.constexpr, VALUES: gl.constexpr, TOGETHER: gl.constexpr,
    ORDER: gl.constexpr, POST_NORM: gl.constexpr, HAS_OFFSET: gl.constexpr, TAIL: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program ``row tile * P + part of the hidden units``; ``out`` may be ``x``.

    The launch's warps are the first group. COUNT: of a program's vectors, VALUES: to a power of 2.
    """
    launch_dependents(PDL)
    TILES: gl.constexpr = C // STEP
    program = gl.program_id(0) % P
    row0 = gl.program_id(0) // P * (GROUPS * STEP)
    tail = 0
    if P > 1:
        tail = tail_address(TAIL)
        expect_bytes(tail, 2 * STEP * C)
    ring = buffers(chunks_desc, SLOTS * TILES)
    x_tiles = buffers(x_desc, GROUPS * TILES)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    vectors = gl.allocate_shared_memory(gl.float32, [VALUES], line)
    full = _barriers(SLOTS, 1)
    used = _barriers(SLOTS, GROUPS)
    x_ready = _barriers(GROUPS, 1)
    turns = _barriers(GROUPS, 1)
    fence_async_shared()
    at = gl.arange(0, VALUES, gl.BlockedLayout([4], [32], [4], [0]))
    vectors.store(gl.load(vectors_ptr + (program * COUNT + at), mask=at < COUNT, other=0.0))
    tl.debug_barrier()
    gl.warp_specialize(
        [
            (_multiply, (
                x_desc, out_desc, offset_ptr, ring, full, used, x_tiles, x_ready, turns, vectors,
                tail, program, row0, eps, part, GROUPS, C, STEPS, SLOTS, P, TOGETHER, ORDER,
                POST_NORM, HAS_OFFSET, PDL,
            ))
            if part < GROUPS else
            (_ask_for_chunks, (
                chunks_desc, ring, full, used, program * (2 * STEPS * C), 2 * STEPS, SLOTS, TILES,
                P,
            ))
            for part in ((0, 1, 2) if GROUPS == 2 else (0, 1, 2, 3))
        ],
        [4, 4] if GROUPS == 2 else [4, 4, 1],
        [REGISTERS, LOADER_REGISTERS] if GROUPS == 2 else [REGISTERS, REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
