"""qkv and window attention of one head and a window of 129 to 160 tokens on Hopper.

    x, out [B, H, W, C]   weight [3C, C]   vectors [3, 3C] fp32 (packing.py)   norm_stats
    [2, PARTS, B H W] fp32 (ops/linear/stats.py) or none   table [kinds, nH, NP, NP]
    (ops/window_attention/packing.py)

hopper_heads.py's problem for windows of 12. A program asks for its head's weights before it waits
for the kernel in front, three warp groups share them; each has 64 of the window's tokens, whose
rows come through a ring of SLOTS tiles of its own:

    q, k, v = rstd * (x @ W.T - mean * W.sum(1)) + b      o = softmax(q k' scale + table) v

Keys and values take the place of rows that a group has multiplied. Each group's queries have their
whole row of scores: 64 keys of the first group, 64 of the second and those of the third. Where no
statistics are given, rows are taken as they are.

1,152 C FLOPs of projections for each of 192 tokens; ``2 N C`` bytes fetched behind the wait, where
qkv's product and attention on its own take ``8 N C`` and a launch more.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastswin._triton.gluon_tiles import accumulator, barriers, buffers
from fastswin._triton.pdl import launch_dependents, wait_for_previous
from fastswin._triton.row_statistics import joined_stats
from fastswin.ops.attention_half.hopper_vectors import keep_vectors, projected
from fastswin.ops.window_attention.hopper_long_tile import attend_long, table_part
from fastswin.ops.window_attention.hopper_tile import HEAD, operand
from fastswin.ops.window_attention.tile import locate_window, token_rows

#: Channels of a step: 128 bytes of a row. Tokens of a warp group, and groups.
STEP = gl.constexpr(64)
TOKENS = gl.constexpr(64)
GROUPS = gl.constexpr(3)


@gluon.constexpr_function
def _copies():
    """Layout in which threads fetch 64 rows of 64 channels, eight of them a row."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def _start(x, weights, ready, STEP_OF: gl.constexpr, SLABS: gl.constexpr, q, k, v):
    """One step's products, under way."""
    if STEP_OF % SLABS == 0:
        mbarrier.wait(ready.index(STEP_OF // SLABS), 0)
    AT: gl.constexpr = STEP_OF // SLABS * (3 * SLABS) + STEP_OF % SLABS
    q = warpgroup_mma(x, weights.index(AT).permute((1, 0)), q, is_async=True)
    k = warpgroup_mma(x, weights.index(AT + SLABS).permute((1, 0)), k, is_async=True)
    v = warpgroup_mma(x, weights.index(AT + 2 * SLABS).permute((1, 0)), v, is_async=True)
    return q, k, v


@gluon.jit
def _multiply(
    pointers, live, tiles, weights, ready, STEPS: gl.constexpr, SLOTS: gl.constexpr,
    SLABS: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """q, k and v of a group's rows, of which SLOTS steps have been asked for.

    A step's rows are read from shared memory while the products of the step before are under way.
    """
    acc: gl.constexpr = accumulator(HEAD)
    q = gl.zeros([TOKENS, HEAD], gl.float32, acc)
    k = gl.zeros([TOKENS, HEAD], gl.float32, acc)
    v = gl.zeros([TOKENS, HEAD], gl.float32, acc)
    async_copy.wait_group(SLOTS - 1)
    tl.debug_barrier()
    x = tiles.index(FIRST).load(operand(HEAD))
    for step in gl.static_range(STEPS):
        q, k, v = _start(x, weights, ready, step, SLABS, q, k, v)
        if step + 1 < STEPS:
            async_copy.wait_group(min(SLOTS - 2, STEPS - step - 2))
            tl.debug_barrier()  # all warps' copies are there, and have read the step before
            y = tiles.index(FIRST + (step + 1) % SLOTS).load(operand(HEAD))
            if step + SLOTS < STEPS:
                async_copy.async_copy_global_to_shared(
                    tiles.index(FIRST + step % SLOTS), pointers + (step + SLOTS) * STEP, mask=live
                )
                async_copy.commit_group()
        q, k, v = warpgroup_mma_wait(0, deps=(q, k, v))
        if step + 1 < STEPS:
            x = y
    return q, k, v


@gluon.jit
def _attend_queries(
    x_ptr, table_ptr, out_ptr, norm_stats_ptr, weights, vectors, tiles, weights_ready, keys_ready,
    scale, eps, H, W, windows_per_col, windows_per_row, tokens,
    GROUP: gl.constexpr, C: gl.constexpr, NH: gl.constexpr, N: gl.constexpr, NP: gl.constexpr,
    WH: gl.constexpr, WW: gl.constexpr, SH: gl.constexpr, SW: gl.constexpr, PARTS: gl.constexpr,
    SLOTS: gl.constexpr, SLABS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warp group: q, k and v of its 64 tokens, then their attention."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    acc: gl.constexpr = accumulator(HEAD)
    STEPS: gl.constexpr = C // STEP
    FIRST: gl.constexpr = GROUP * SLOTS
    LAST_KEYS: gl.constexpr = NP - 2 * TOKENS
    head = gl.program_id(0) % NH
    image, window_row, window_col, kind = locate_window(
        gl.program_id(0) // NH, windows_per_col, windows_per_row, SH + SW > 0, False
    )
    token = GROUP * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, _copies()))
    at = token_rows(window_row, window_col, token, H, W, WH, WW, SH, SW, False, False, False) * C
    channel = gl.arange(0, STEP, gl.SliceLayout(0, _copies()))
    pointers = x_ptr + image * H * W * C + (at[:, None] + channel[None, :])
    inside = (token < N)[:, None]
    row = GROUP * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, acc))
    place = token_rows(window_row, window_col, row, H, W, WH, WW, SH, SW, False, False, False)
    live = row < N
    table_ptr += (kind * NH + head) * (NP * NP)
    wait_for_previous(PDL)
    for step in gl.static_range(SLOTS):
        async_copy.async_copy_global_to_shared(
            tiles.index(FIRST + step), pointers + step * STEP, mask=inside
        )
        async_copy.commit_group()
    table0 = table_part(table_ptr, GROUP * TOKENS, 0, TOKENS, NP)
    table1 = table_part(table_ptr, GROUP * TOKENS, TOKENS, TOKENS, NP)
    table2 = table_part(table_ptr, GROUP * TOKENS, 2 * TOKENS, LAST_KEYS, NP)
    mean = gl.zeros_like(row).to(gl.float32)
    rstd = mean
    if PARTS > 0:
        mean, rstd = joined_stats(
            norm_stats_ptr, image * H * W + place, live, tokens, eps, C, PARTS
        )
    q, k, v = _multiply(pointers, inside, tiles, weights, weights_ready, STEPS, SLOTS, SLABS, FIRST)
    q = projected(q, vectors, 0, mean, rstd, PARTS > 0) * scale
    k = projected(k, vectors, 1, mean, rstd, PARTS > 0)
    v = projected(v, vectors, 2, mean, rstd, PARTS > 0)
    keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, HEAD], dtype)
    kv0 = tiles.index(0)._reinterpret(dtype, [2, TOKENS, HEAD], keys)
    kv1 = tiles.index(SLOTS)._reinterpret(dtype, [2, TOKENS, HEAD], keys)
    kv2 = tiles.index(2 * SLOTS)._reinterpret(dtype, [2, TOKENS, HEAD], keys)
    own = tiles.index(FIRST)._reinterpret(dtype, [2, TOKENS, HEAD], keys)
    tl.debug_barrier()  # all warps have read all rows
    own.index(0).store(k.to(dtype))
    own.index(1).store(v.to(dtype))
    q = gl.convert_layout(q.to(dtype), operand(HEAD), assert_trivial=True)
    fence_async_shared()
    tl.debug_barrier()  # all warps have stored
    mbarrier.arrive(keys_ready.index(0), count=1)
    mbarrier.wait(keys_ready.index(0), 0)
    o = attend_long(
        q, kv0.index(0), kv1.index(0), kv2.index(0).slice(0, LAST_KEYS), kv0.index(1), kv1.index(1),
        kv2.index(1).slice(0, LAST_KEYS), table0, table1, table2, dtype,
    )  # fmt: skip
    column = head * HEAD + gl.arange(0, HEAD, gl.SliceLayout(0, acc))
    out_ptr += image * H * W * C + (place * C)[:, None] + column[None, :]
    gl.store(out_ptr, o.to(dtype), mask=live[:, None])


@gluon.jit(do_not_specialize=["H", "W", "windows_per_col", "windows_per_row", "tokens"])
def _hopper_long_kernel(
    x_ptr, weight_desc, vectors_ptr, table_ptr, out_ptr, norm_stats_ptr, scale, eps, H, W,
    windows_per_col, windows_per_row, tokens,
    C: gl.constexpr, NH: gl.constexpr, N: gl.constexpr, NP: gl.constexpr, WH: gl.constexpr,
    WW: gl.constexpr, SH: gl.constexpr, SW: gl.constexpr, PARTS: gl.constexpr,
    SLOTS: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program ``window * NH + head``; without PARTS rows are taken as they are."""
    launch_dependents(PDL)
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    WIDTH: gl.constexpr = weight_desc.block_type.shape[1]
    BLOCKS: gl.constexpr = C // WIDTH
    column = gl.program_id(0) % NH * HEAD
    blocks = buffers(weight_desc, 3 * BLOCKS)
    weights_ready = barriers(BLOCKS, 1)
    keys_ready = barriers(1, GROUPS)
    fence_async_shared()
    for block in gl.static_range(BLOCKS):
        mbarrier.expect(weights_ready.index(block), 3 * weight_desc.block_type.nbytes)
        for part in gl.static_range(3):
            tma.async_copy_global_to_shared(
                weight_desc, [part * C + column, block * WIDTH], weights_ready.index(block),
                blocks.index(3 * block + part),
            )  # fmt: skip
    slab: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEAD, STEP], dtype)
    weights = blocks._reinterpret(dtype, [3 * C // STEP, HEAD, STEP], slab)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, STEP], dtype)
    tiles = gl.allocate_shared_memory(dtype, [GROUPS * SLOTS, TOKENS, STEP], square)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    vectors = gl.allocate_shared_memory(gl.float32, [6, 1, HEAD], flat)
    keep_vectors(vectors, vectors_ptr, column, C)
    tl.debug_barrier()
    gl.warp_specialize(
        [
            (_attend_queries, (
                x_ptr, table_ptr, out_ptr, norm_stats_ptr, weights, vectors, tiles, weights_ready,
                keys_ready, scale, eps, H, W, windows_per_col, windows_per_row, tokens, part, C,
                NH, N, NP, WH, WW, SH, SW, PARTS, SLOTS, WIDTH // STEP, PDL,
            ))
            for part in (0, 1, 2)
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
