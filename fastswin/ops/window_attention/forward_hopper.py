"""Window attention of few windows of 129 to 160 tokens on Hopper: a program per window and head.

    qkv [B, H, W, 3, nH, 32]   table [kinds, nH, NP, NP], base 2 (packing.py)
    out [B, H, W, nH, 32]

    out = softmax(q k' scale + table) v

At batch 1 a Swin of windows of 12 has 32 to 128 pairs of a window and a head, one a multiprocessor
at most, and nothing but latency: 5 us in forward.py, whose tiles of queries wait for keys, for the
table and for each other. Here three warp groups have 64 queries each and keep their whole rows of
scores (hopper_long_tile.py). Each asks for its rows of the table through the copy engine before the
wait for the kernel in front: loads in the layout of scores, 4 bytes a thread in 8 rows at a time,
took 1.3 us. Behind the wait it fetches its 64 tokens' q, k and v by 16 bytes a thread, since no
rectangle of the map holds a shifted window's.

128 N FLOPs for each of 192 queries; ``256 N + 2 NP**2`` bytes a program.
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
)

from fastswin._triton.gluon_tiles import accumulator, barriers, buffers
from fastswin._triton.pdl import wait_for_previous
from fastswin.ops.window_attention.hopper_long_tile import attend_long
from fastswin.ops.window_attention.hopper_tile import HEAD, operand
from fastswin.ops.window_attention.tile import locate_window, token_rows

#: Tokens of a warp group, and groups.
TOKENS = gl.constexpr(64)
GROUPS = gl.constexpr(3)


@gluon.constexpr_function
def _copies():
    """Layout in which threads fetch 64 rows of 32 channels, four of them a row."""
    return gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])


@gluon.jit
def _ask_for_table(table_desc, last_desc, tables, last_tables, ready, row, GROUP: gl.constexpr):
    """A group's 64 rows over all keys; of rows behind a table those of the next one, unread."""
    barrier = ready.index(GROUP)
    mbarrier.expect(barrier, 2 * table_desc.block_type.nbytes + last_desc.block_type.nbytes)
    for part in gl.static_range(2):
        tma.async_copy_global_to_shared(
            table_desc, [row, part * TOKENS], barrier, tables.index(2 * GROUP + part)
        )
    tma.async_copy_global_to_shared(last_desc, [row, 2 * TOKENS], barrier, last_tables.index(GROUP))


@gluon.jit
def _attend_queries(
    qkv_ptr, table_desc, last_desc, out_ptr, tables, last_tables, table_ready, q_tiles, k_tiles,
    v_tiles, ready, scale, H, W, windows_per_col, windows_per_row,
    GROUP: gl.constexpr, C: gl.constexpr, NH: gl.constexpr, N: gl.constexpr, NP: gl.constexpr,
    WH: gl.constexpr, WW: gl.constexpr, SH: gl.constexpr, SW: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warp group's 64 queries."""
    LAST_KEYS: gl.constexpr = NP - 2 * TOKENS
    dtype: gl.constexpr = qkv_ptr.dtype.element_ty
    acc: gl.constexpr = accumulator(HEAD)
    head = gl.program_id(0) % NH
    image, window_row, window_col, kind = locate_window(
        gl.program_id(0) // NH, windows_per_col, windows_per_row, SH + SW > 0, False
    )
    table_row = (kind * NH + head) * NP + GROUP * TOKENS
    _ask_for_table(table_desc, last_desc, tables, last_tables, table_ready, table_row, GROUP)
    token = GROUP * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, _copies()))
    at = token_rows(window_row, window_col, token, H, W, WH, WW, SH, SW, False, False, False)
    channel = head * HEAD + gl.arange(0, HEAD, gl.SliceLayout(0, _copies()))
    source = qkv_ptr + image * H * W * (3 * C) + at[:, None] * (3 * C) + channel[None, :]
    live = (token < N)[:, None]
    wait_for_previous(PDL)
    async_copy.async_copy_global_to_shared(q_tiles.index(GROUP), source, mask=live)
    async_copy.async_copy_global_to_shared(k_tiles.index(GROUP), source + C, mask=live)
    async_copy.async_copy_global_to_shared(v_tiles.index(GROUP), source + 2 * C, mask=live)
    async_copy.commit_group()
    query = GROUP * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, acc))
    place = token_rows(window_row, window_col, query, H, W, WH, WW, SH, SW, False, False, False)
    mbarrier.wait(table_ready.index(GROUP), 0)
    table0 = tables.index(2 * GROUP).load(accumulator(TOKENS))
    table1 = tables.index(2 * GROUP + 1).load(accumulator(TOKENS))
    table2 = last_tables.index(GROUP).load(accumulator(LAST_KEYS))
    async_copy.wait_group(0)
    fence_async_shared()
    tl.debug_barrier()  # all warps' copies are there
    mbarrier.arrive(ready.index(0), count=1)
    q = q_tiles.index(GROUP).load(acc).to(gl.float32) * scale
    q = gl.convert_layout(q.to(dtype), operand(HEAD), assert_trivial=True)
    mbarrier.wait(ready.index(0), 0)
    o = attend_long(
        q, k_tiles.index(0), k_tiles.index(1), k_tiles.index(2).slice(0, LAST_KEYS),
        v_tiles.index(0), v_tiles.index(1), v_tiles.index(2).slice(0, LAST_KEYS), table0, table1,
        table2, dtype,
    )  # fmt: skip
    column = head * HEAD + gl.arange(0, HEAD, gl.SliceLayout(0, acc))
    out_ptr += image * H * W * C + (place * C)[:, None] + column[None, :]
    gl.store(out_ptr, o.to(dtype), mask=(query < N)[:, None])


@gluon.jit(do_not_specialize=["H", "W", "windows_per_col", "windows_per_row"])
def _hopper_attention_kernel(
    qkv_ptr, table_desc, last_desc, out_ptr, scale, H, W, windows_per_col, windows_per_row,
    C: gl.constexpr, NH: gl.constexpr, N: gl.constexpr, NP: gl.constexpr, WH: gl.constexpr,
    WW: gl.constexpr, SH: gl.constexpr, SW: gl.constexpr, REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Program ``window * NH + head``; the launch's warps are the first group."""
    dtype: gl.constexpr = qkv_ptr.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, HEAD], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [GROUPS, TOKENS, HEAD], tile)
    k_tiles = gl.allocate_shared_memory(dtype, [GROUPS, TOKENS, HEAD], tile)
    v_tiles = gl.allocate_shared_memory(dtype, [GROUPS, TOKENS, HEAD], tile)
    tables = buffers(table_desc, 2 * GROUPS)
    last_tables = buffers(last_desc, GROUPS)
    ready = barriers(1, GROUPS)
    table_ready = barriers(GROUPS, 1)
    fence_async_shared()
    tl.debug_barrier()
    gl.warp_specialize(
        [
            (_attend_queries, (
                qkv_ptr, table_desc, last_desc, out_ptr, tables, last_tables, table_ready, q_tiles,
                k_tiles, v_tiles, ready, scale, H, W, windows_per_col, windows_per_row, part, C,
                NH, N, NP, WH, WW, SH, SW, PDL,
            ))
            for part in (0, 1, 2)
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
