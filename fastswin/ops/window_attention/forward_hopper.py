"""Window attention of few windows of 129 to 160 tokens on Hopper: a program per window and head.

    qkv [B, H, W, 3, nH, 32]   table [kinds, nH, NP, NP], base 2 (packing.py)
    out [B, H, W, nH, 32]

    out = softmax(q k' scale + table) v

At batch 1 a Swin of windows of 12 has 32 to 128 pairs of a window and a head, one a multiprocessor
at most, and nothing but latency: 5 us in forward.py, whose tiles of queries wait for keys, for the
table and for each other. Here three warp groups have 64 queries each, whose whole rows of scores
they keep, keys in two tiles (144 = 128 + 16). The table is asked for, into registers, before the
wait for the kernel in front, behind which each group fetches its 64 tokens' q, k and v by 16 bytes
a thread, since no rectangle of the map holds a shifted window's. Scores start as the table, q takes
the scale; products are asynchronous ones.

256 N C FLOPs a head and window, of 192 tokens; ``192 N + 2 NP**2`` bytes a program.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastswin._triton.gluon_tiles import accumulator, barriers
from fastswin._triton.pdl import launch_dependents, wait_for_previous
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
def _table(table_ptr, first, FIRST_KEY: gl.constexpr, KEYS: gl.constexpr, NP: gl.constexpr):
    """A group's queries' row of a table over some keys; 0 for queries behind it."""
    acc: gl.constexpr = accumulator(KEYS)
    query = first + gl.arange(0, TOKENS, gl.SliceLayout(1, acc))
    key = FIRST_KEY + gl.arange(0, KEYS, gl.SliceLayout(0, acc))
    inside = (query < NP)[:, None] & (key < NP)[None, :]
    return gl.load(table_ptr + query[:, None] * NP + key[None, :], mask=inside, other=0.0)


@gluon.jit
def _largest(s, rows: gl.constexpr):
    """Largest score of each row."""
    return gl.convert_layout(gl.max(s, 1), rows, assert_trivial=True)


@gluon.jit
def _weights(s, largest, dtype: gl.constexpr, rows: gl.constexpr):
    """Weights as a first operand, and their sums."""
    KEYS: gl.constexpr = s.shape[1]
    around: gl.constexpr = gl.SliceLayout(1, accumulator(KEYS))
    p = gl.exp2(s - gl.convert_layout(largest, around, assert_trivial=True)[:, None])
    total = gl.convert_layout(gl.sum(p, 1), rows, assert_trivial=True)
    return gl.convert_layout(p.to(dtype), operand(KEYS), assert_trivial=True), total


@gluon.jit
def _attend_queries(
    qkv_ptr, table_ptr, out_ptr, q_tiles, k1_tiles, k2_tiles, v1_tiles, v2_tiles, ready, scale, H,
    W, windows_per_col, windows_per_row,
    GROUP: gl.constexpr, C: gl.constexpr, NH: gl.constexpr, N: gl.constexpr, NP: gl.constexpr,
    K1: gl.constexpr, K2: gl.constexpr, WH: gl.constexpr, WW: gl.constexpr, SH: gl.constexpr,
    SW: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warp group's 64 queries."""
    dtype: gl.constexpr = qkv_ptr.dtype.element_ty
    acc: gl.constexpr = accumulator(HEAD)
    rows: gl.constexpr = gl.SliceLayout(1, acc)
    head = gl.program_id(0) % NH
    image, window_row, window_col, kind = locate_window(
        gl.program_id(0) // NH, windows_per_col, windows_per_row, SH + SW > 0, False
    )
    table_ptr += (kind * NH + head) * (NP * NP)
    table1 = _table(table_ptr, GROUP * TOKENS, 0, K1, NP)
    table2 = _table(table_ptr, GROUP * TOKENS, K1, K2, NP)
    token = GROUP * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, _copies()))
    at = token_rows(window_row, window_col, token, H, W, WH, WW, SH, SW, False, False, False)
    channel = head * HEAD + gl.arange(0, HEAD, gl.SliceLayout(0, _copies()))
    source = qkv_ptr + image * H * W * (3 * C) + at[:, None] * (3 * C) + channel[None, :]
    live = (token < N)[:, None]
    wait_for_previous(PDL)
    async_copy.async_copy_global_to_shared(q_tiles.index(GROUP), source, mask=live)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, HEAD], dtype)
    if GROUP < 2:
        k = k1_tiles._reinterpret(dtype, [2, TOKENS, HEAD], tile).index(GROUP)
        v = v1_tiles._reinterpret(dtype, [2, TOKENS, HEAD], tile).index(GROUP)
    else:
        k = k2_tiles.index(0)
        v = v2_tiles.index(0)
    async_copy.async_copy_global_to_shared(k, source + C, mask=live)
    async_copy.async_copy_global_to_shared(v, source + 2 * C, mask=live)
    async_copy.commit_group()
    query = GROUP * TOKENS + gl.arange(0, TOKENS, rows)
    place = token_rows(window_row, window_col, query, H, W, WH, WW, SH, SW, False, False, False)
    async_copy.wait_group(0)
    fence_async_shared()
    tl.debug_barrier()  # all warps' copies are there
    mbarrier.arrive(ready.index(0), count=1)
    q = q_tiles.index(GROUP).load(acc).to(gl.float32) * scale
    q = gl.convert_layout(q.to(dtype), operand(HEAD), assert_trivial=True)
    mbarrier.wait(ready.index(0), 0)
    k1 = k1_tiles.index(0).permute((1, 0))
    k2 = k2_tiles.index(0).slice(0, K2).permute((1, 0))
    s1 = warpgroup_mma(q, k1, table1.to(gl.float32), is_async=True)
    s2 = warpgroup_mma(q, k2, table2.to(gl.float32), is_async=True)
    s1, s2 = warpgroup_mma_wait(0, deps=(s1, s2))
    largest = gl.maximum(_largest(s1, rows), _largest(s2, rows))
    p1, total1 = _weights(s1, largest, dtype, rows)
    p2, total2 = _weights(s2, largest, dtype, rows)
    o = gl.zeros([TOKENS, HEAD], gl.float32, acc)
    o = warpgroup_mma(p1, v1_tiles.index(0), o, is_async=True)
    o = warpgroup_mma(p2, v2_tiles.index(0).slice(0, K2), o, is_async=True)
    inverse = 1.0 / (total1 + total2)
    o = warpgroup_mma_wait(0, deps=(o,))
    column = head * HEAD + gl.arange(0, HEAD, gl.SliceLayout(0, acc))
    out_ptr += image * H * W * C + (place * C)[:, None] + column[None, :]
    gl.store(out_ptr, (o * inverse[:, None]).to(dtype), mask=(query < N)[:, None])


@gluon.jit(do_not_specialize=["H", "W", "windows_per_col", "windows_per_row"])
def _hopper_attention_kernel(
    qkv_ptr, table_ptr, out_ptr, scale, H, W, windows_per_col, windows_per_row,
    C: gl.constexpr, NH: gl.constexpr, N: gl.constexpr, NP: gl.constexpr, K1: gl.constexpr,
    K2: gl.constexpr, WH: gl.constexpr, WW: gl.constexpr, SH: gl.constexpr, SW: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program ``window * NH + head``; the launch's warps are the first group."""
    launch_dependents(PDL)
    dtype: gl.constexpr = qkv_ptr.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, HEAD], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [GROUPS, TOKENS, HEAD], tile)
    tall: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K1, HEAD], dtype)
    k1_tiles = gl.allocate_shared_memory(dtype, [1, K1, HEAD], tall)
    v1_tiles = gl.allocate_shared_memory(dtype, [1, K1, HEAD], tall)
    k2_tiles = gl.allocate_shared_memory(dtype, [1, TOKENS, HEAD], tile)
    v2_tiles = gl.allocate_shared_memory(dtype, [1, TOKENS, HEAD], tile)
    ready = barriers(1, GROUPS)
    tl.debug_barrier()
    gl.warp_specialize(
        [
            (_attend_queries, (
                qkv_ptr, table_ptr, out_ptr, q_tiles, k1_tiles, k2_tiles, v1_tiles, v2_tiles,
                ready, scale, H, W, windows_per_col, windows_per_row, part, C, NH, N, NP, K1, K2,
                WH, WW, SH, SW, PDL,
            ))
            for part in (0, 1, 2)
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
