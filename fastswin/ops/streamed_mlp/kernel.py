"""The MLP half of a block on Hopper: rows stay on a multiprocessor, weights stream past them.

    V1   out = x' + fc2(gelu(fc1(norm(x'))))          x' = x + offset
    V2   out = x' + norm(fc2(gelu(fc1(x')))) * weight + bias

    x, out [M, C]   fc1 [H, C]   fc2 [C, H]   biases, norm weight and bias fp32

A stage of 192 channels has 590 KB of MLP weights: too many for one multiprocessor to keep, few
enough to stream from L2 for every 192 rows, in the time of their products. Launched by parts, its
hidden rows go through memory and back, four fifths of all bytes. Here a program has 64 rows for
each of its warp groups. 64 hidden units at a time

    h = x @ W1.T + b1     y += gelu(h) @ W2.T

h lives in registers only, y ``[64, C]`` as well. Of two groups the normalised rows do too, as first
operands (HELD). Three have no registers for them: there they take the place of x in shared memory,
at a third more traffic, and x is asked for again as residual once fc1 is done. A warp of its own
asks for chunks, and groups say by barriers that they have multiplied one. Where rows are too few
for all multiprocessors, two programs share 128 rows, each with half of the hidden units for both
groups; then each finishes one group's rows with the other's sums, which cross in x's type
(exchange.py).

4 M C H FLOPs; 2 M C values to and from memory; 2 C H values from L2 for each program, of two for
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
    cluster_arrive_relaxed,
    cluster_wait,
    expect_bytes,
    tail_address,
    wait_bytes,
)
from fastswin._triton.gluon_rows import from_row, normalized, row_layout
from fastswin._triton.gluon_tiles import accumulator, barriers, buffers, in_registers
from fastswin._triton.math import gelu
from fastswin._triton.pdl import wait_for_previous
from fastswin.ops.streamed_mlp import config
from fastswin.ops.streamed_mlp.exchange import PART_BYTES, receive_part, send_part

#: Rows of a group, columns of a tile, hidden units of a step.
STEP = gl.constexpr(config.STEP)

#: Bytes of a tail before the sums.
BARRIER = gl.constexpr(config.TAIL_BARRIER)

#: Registers of a thread that asks for chunks.
LOADER_REGISTERS = gl.constexpr(config.LOADER_REGISTERS)


@gluon.constexpr_function
def _power_of_2(count):
    return 1 << (count - 1).bit_length()


@gluon.jit
def _vector(ptr, COUNT: gl.constexpr):
    """So many fp32 values in shared memory, 64 at a time as rows of tiles."""
    VALUES: gl.constexpr = _power_of_2(COUNT)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    kept = gl.allocate_shared_memory(gl.float32, [VALUES], line)
    at = gl.arange(0, VALUES, gl.BlockedLayout([1], [32], [4], [0]))
    kept.store(gl.load(ptr + at, mask=at < COUNT, other=0.0).to(gl.float32))
    return kept._reinterpret(gl.float32, [VALUES // STEP, 1, STEP], row_layout())


@gluon.jit
def _ask_for_chunks(
    fc1_desc, fc2_desc, ring, full, used, first, STEPS: gl.constexpr, SLOTS: gl.constexpr,
    TILES: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Chunks in order, each once its slot is empty; weights wait for no kernel in front.

    A step's fc1 stands before fc2 of the step before: it is multiplied at the same time and its
    slot is empty first. ``first`` is the program's first hidden unit.
    """
    if P > 1:
        cluster_arrive_relaxed()
    _ask_for_chunk(fc1_desc, ring, full, used, 0, first, True, SLOTS, TILES)
    for step in range(STEPS):
        unit = first + step * STEP
        if step < STEPS - 1:
            _ask_for_chunk(
                fc1_desc, ring, full, used, 2 * step + 1, unit + STEP, True, SLOTS, TILES
            )  # fmt: skip
        chunk = gl.minimum(2 * step + 2, 2 * STEPS - 1)
        _ask_for_chunk(fc2_desc, ring, full, used, chunk, unit, False, SLOTS, TILES)
    if P > 1:
        cluster_wait()


@gluon.jit
def _ask_for_chunk(
    desc, ring, full, used, chunk, unit, FC1: gl.constexpr, SLOTS: gl.constexpr,
    TILES: gl.constexpr,
):  # fmt: skip
    """What 64 hidden units from ``unit`` on have of a layer: units by channels, or the reverse."""
    slot = chunk % SLOTS
    mbarrier.wait(used.index(slot), (chunk // SLOTS & 1) ^ 1)
    ready = full.index(slot)
    mbarrier.expect(ready, TILES * desc.block_type.nbytes)
    for tile in gl.static_range(TILES):
        at = [unit, tile * STEP] if FC1 else [tile * STEP, unit]
        tma.async_copy_global_to_shared(desc, at, ready, ring.index(slot * TILES + tile))


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
def _expand(h, x, ring, full, chunk, SLOTS: gl.constexpr):
    """64 hidden units on top of their bias, before GELU, under way."""
    slot = chunk % SLOTS
    mbarrier.wait(full.index(slot), chunk // SLOTS & 1)
    for tile in gl.static_range(len(x)):
        weight = ring.index(slot * len(x) + tile).permute((1, 0))
        h = warpgroup_mma(x[tile], weight, h, is_async=True)
    return h


@gluon.jit
def _operand(tile, dtype: gl.constexpr):
    """A tile as a first operand; each thread keeps what it holds."""
    layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(STEP), 2)
    return gl.convert_layout(tile.to(dtype), layout, assert_trivial=True)


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
def _finish(
    y, x_tiles, out_desc, norm_weight, norm_bias, offset_ptr, row, eps, dtype: gl.constexpr,
    GROUP: gl.constexpr, POST_NORM: gl.constexpr, HAS_OFFSET: gl.constexpr,
):  # fmt: skip
    """V2's norm, the residual, and out to memory."""
    TILES: gl.constexpr = len(y)
    if POST_NORM:
        y = normalized(y, eps, TILES * STEP)
        scaled = ()
        for tile in gl.static_range(TILES):
            weight = from_row(norm_weight, tile, STEP)
            scaled += (y[tile] * weight + from_row(norm_bias, tile, STEP),)
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
    x_desc, out_desc, offset_ptr, ring, full, used, x_tiles, x_ready, fc1_bias, fc2_bias,
    norm_weight, norm_bias, tail, program, row0, eps, GROUP: gl.constexpr, C: gl.constexpr,
    STEPS: gl.constexpr, SLOTS: gl.constexpr, P: gl.constexpr, HELD: gl.constexpr,
    TOGETHER: gl.constexpr, POST_NORM: gl.constexpr, HAS_OFFSET: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warp group's 64 rows."""
    CHANGED: gl.constexpr = not HELD and (not POST_NORM or HAS_OFFSET)
    dtype: gl.constexpr = out_desc.dtype
    TILES: gl.constexpr = C // STEP
    row = row0 + GROUP * STEP
    ready = x_ready.index(GROUP)
    if P > 1:
        cluster_arrive_relaxed()
    wait_for_previous(PDL)
    _ask_for_rows(x_desc, x_tiles, ready, row, GROUP, TILES)
    mbarrier.wait(ready, 0)
    if HELD or CHANGED:
        rows = _rows(x_tiles, offset_ptr, GROUP, TILES, HAS_OFFSET)
        if not POST_NORM:
            rows = normalized(rows, eps, C)
        if CHANGED:
            _keep(rows, x_tiles, dtype, GROUP)
    x = ()
    for tile in gl.static_range(TILES):
        if HELD:
            x += (_operand(rows[tile], dtype),)
        else:
            x += (x_tiles.index(GROUP * TILES + tile),)
    y = ()
    for tile in gl.static_range(TILES):
        bias = from_row(fc2_bias, tile, STEP)
        if P > 1:  # the group whose rows another program finishes adds none
            bias = gl.where(program == GROUP, bias, 0.0)
        y += (bias,)
    begun = in_registers((from_row(fc1_bias, 0, STEP),) + y)  # noqa: RUF005
    h = _expand(begun[0], x, ring, full, 0, SLOTS)
    h = warpgroup_mma_wait(0, deps=(h,))
    _release(used, 0, SLOTS)
    y = begun[1:]
    for step in range(STEPS - 1):
        units = _operand(gelu(h), dtype)
        if TOGETHER:
            begun = in_registers((from_row(fc1_bias, step + 1, STEP),) + y)  # noqa: RUF005
            y = _shrink(units, begun[1:], ring, full, 2 * step + 2, SLOTS)
            h = _expand(begun[0], x, ring, full, 2 * step + 1, SLOTS)
            done = warpgroup_mma_wait(0, deps=(h,) + y)  # noqa: RUF005
            _release(used, 2 * step + 1, SLOTS)
            _release(used, 2 * step + 2, SLOTS)
            h = done[0]
            y = done[1:]
        else:
            y = _shrink(units, y, ring, full, 2 * step + 2, SLOTS)
            y = warpgroup_mma_wait(0, deps=y)
            _release(used, 2 * step + 2, SLOTS)
            h = in_registers((from_row(fc1_bias, step + 1, STEP),))
            h = _expand(h, x, ring, full, 2 * step + 1, SLOTS)
            h = warpgroup_mma_wait(0, deps=(h,))
            _release(used, 2 * step + 1, SLOTS)
    if CHANGED:
        tl.debug_barrier()  # fc1 of all the group's warps is done
        if P == 1 or program == GROUP:  # out may be x: no other group writes these rows
            _ask_for_rows(x_desc, x_tiles, ready, row, GROUP, TILES)
    units = _operand(gelu(h), dtype)
    y = _shrink(units, y, ring, full, 2 * STEPS - 1, SLOTS)
    y = warpgroup_mma_wait(0, deps=y)
    if P > 1:
        cluster_wait()
        if program == GROUP:
            wait_bytes(tail)
            sums = ()
            for tile in gl.static_range(TILES):
                sums += (y[tile] + receive_part(tail + BARRIER + tile * PART_BYTES, dtype),)
            if CHANGED:
                mbarrier.wait(ready, 1)
            _finish(
                sums, x_tiles, out_desc, norm_weight, norm_bias, offset_ptr, row, eps, dtype,
                GROUP, POST_NORM, HAS_OFFSET,
            )  # fmt: skip
        else:
            for tile in gl.static_range(TILES):
                send_part(
                    y[tile].to(dtype), tail + BARRIER + tile * PART_BYTES, tail, 1 - program
                )  # fmt: skip
    else:
        if CHANGED:
            mbarrier.wait(ready, 1)
        _finish(
            y, x_tiles, out_desc, norm_weight, norm_bias, offset_ptr, row, eps, dtype, GROUP,
            POST_NORM, HAS_OFFSET,
        )  # fmt: skip


@gluon.jit
def _streamed_mlp_kernel(
    fc1_bias_ptr, fc2_bias_ptr, norm_weight_ptr, norm_bias_ptr, offset_ptr, x_desc, fc1_desc,
    fc2_desc, out_desc, eps,
    C: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr, P: gl.constexpr,
    SLOTS: gl.constexpr, HELD: gl.constexpr,
    TOGETHER: gl.constexpr, POST_NORM: gl.constexpr, HAS_OFFSET: gl.constexpr, TAIL: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program ``row tile * P + part of the hidden units``; ``out`` may be ``x``.

    The launch's warps are the first group, a worker's ask for weights.
    """
    TILES: gl.constexpr = C // STEP
    program = gl.program_id(0) % P
    row0 = gl.program_id(0) // P * (GROUPS * STEP)
    tail = 0
    if P > 1:
        tail = tail_address(TAIL)
        expect_bytes(tail, 2 * STEP * C)
    ring = buffers(fc1_desc, SLOTS * TILES)
    x_tiles = buffers(x_desc, GROUPS * TILES)
    full = barriers(SLOTS, 1)
    used = barriers(SLOTS, GROUPS)
    x_ready = barriers(GROUPS, 1)
    fence_async_shared()
    fc1_bias = _vector(fc1_bias_ptr + program * (STEPS * STEP), STEPS * STEP)
    fc2_bias = _vector(fc2_bias_ptr, C)
    norm_weight = fc2_bias
    norm_bias = fc2_bias
    if POST_NORM:
        norm_weight = _vector(norm_weight_ptr, C)
        norm_bias = _vector(norm_bias_ptr, C)
    tl.debug_barrier()
    gl.warp_specialize(
        [
            (_multiply, (
                x_desc, out_desc, offset_ptr, ring, full, used, x_tiles, x_ready, fc1_bias,
                fc2_bias, norm_weight, norm_bias, tail, program, row0, eps, part, C, STEPS, SLOTS,
                P, HELD, TOGETHER, POST_NORM, HAS_OFFSET, PDL,
            ))
            if part < GROUPS else
            (_ask_for_chunks, (
                fc1_desc, fc2_desc, ring, full, used, program * (STEPS * STEP), STEPS, SLOTS,
                TILES, P,
            ))
            for part in ((0, 1, 2) if GROUPS == 2 else (0, 1, 2, 3))
        ],
        [4, 4] if GROUPS == 2 else [4, 4, 1],
        [REGISTERS, LOADER_REGISTERS] if GROUPS == 2 else [REGISTERS, REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
