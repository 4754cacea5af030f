"""The attention half of several windows on Hopper, from norm to residual, all weights in place.

    x, out [B, H, W, C]   qkv [3C, C]   proj [C, C]   vectors [6, C] fp32 (packing.py)
    table [kinds nH 64, 64], head_scale [nH] (ops/window_attention/packing.py)

V1: out = x + proj(attn(norm(x)));  V2: out = x + norm(proj(attn(x))) * g + b

whole.py's problem for 96 or 128 channels in heads of 32 and windows of 49 to 64 tokens. There a
program takes a window and asks for ``8 C**2`` bytes of weights head by head; of its 9.5 us most are
latency. Here a program, at most one a multiprocessor, takes SHARE windows and asks for all weights
once, before it waits for the kernel in front: 74 KB of 96 channels, 131 KB of 128. GROUPS warp
groups take every GROUPS-th of its windows each, so that one group's softmax stands beside another's
products. A group has a window's rows, keys and values of a head, and a bias table of its own:

    sums = proj_bias (+ x in V1)      q, k, v = norm(x) @ W.T + b (x in V2)
    sums += softmax(q k' + table) v @ P.T, head by head

Rows are read from shared memory once, as operands of C / WIDTH column parts (96 = 3 * 32, 128 =
2 * 64), and stay in 24 or 32 registers a thread for all heads. Their tile is free from then on: the
next window's rows have as long to come as this one takes. They come by 16 bytes a thread, since no
rectangle of the map holds a shifted window's. LayerNorm is done in registers, once: behind the
products, as in hopper_windows.py, it would take 96 instructions a head. A head's part of proj runs
beside q, k and v of the next, and its table, through the copy engine, beside the head before.
Results leave by 16 bytes a thread through the memory of keys and values; from the products'
registers a thread would write 4, and a warp half sectors.

8 C**2 + 4 N C FLOPs a token, 64 / N of which are padding. ``8 C**2`` bytes a program, ``4 N C`` and
``256 C`` of tables a window. Instructions bound it: of 96 channels 2,200 a warp and window in V1.
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
    warpgroup_mma_wait,
)

from fastswin._triton.gluon_rows import row_layout
from fastswin._triton.gluon_tiles import accumulator, buffers
from fastswin._triton.pdl import wait_for_previous
from fastswin.ops.attention_half.hopper_whole_tile import (
    BLOCK,
    BLOCKS,
    begin_sums,
    end_sums,
    project,
    project_back,
)
from fastswin.ops.window_attention.hopper_tile import HEAD, attend, operand
from fastswin.ops.window_attention.tile import locate_window, token_rows


@gluon.constexpr_function
def _copies(WIDTH):
    """Layout in which threads move 64 rows of a part's columns, eight of them a thread."""
    return gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])


@gluon.jit
def _pointers(
    ptr, image, window_row, window_col, H, W, C: gl.constexpr, WIDTH: gl.constexpr,
    WH: gl.constexpr, WW: gl.constexpr, SH: gl.constexpr, SW: gl.constexpr,
):  # fmt: skip
    """Where a window's rows of the first part lie, in the layout of copies."""
    token = gl.arange(0, 64, gl.SliceLayout(1, _copies(WIDTH)))
    at = token_rows(window_row, window_col, token, H, W, WH, WW, SH, SW, False, False, False) * C
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, _copies(WIDTH)))
    return ptr + (image * H * W * C + (at[:, None] + channel[None, :]))


@gluon.jit
def _fetch_window(
    x_ptr, tiles, first, image, window_row, window_col, there, H, W, C: gl.constexpr,
    WIDTH: gl.constexpr, N: gl.constexpr, WH: gl.constexpr, WW: gl.constexpr, SH: gl.constexpr,
    SW: gl.constexpr,
):  # fmt: skip
    """Ask a window's rows, if it is ``there``, into the tiles from ``first`` on; 0 behind them.

    ``out`` may be ``x``: these rows are other windows' than those that are being written.
    """
    pointers = _pointers(
        x_ptr, image, window_row, window_col, H, W, C, WIDTH, WH, WW, SH, SW
    )  # fmt: skip
    token = gl.arange(0, 64, gl.SliceLayout(1, _copies(WIDTH)))
    live = (token < N)[:, None] & there
    for part in gl.static_range(C // WIDTH):
        async_copy.async_copy_global_to_shared(
            tiles.index(first + part), pointers + part * WIDTH, mask=live
        )
    async_copy.commit_group()


@gluon.jit
def _request_table(table_desc, tables, ready, group, table, wanted):
    """Ask for a head's bias table into the group's tile, which all warps have read."""
    mbarrier.expect(ready.index(group), table_desc.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(
        table_desc, [table * 64, 0], ready.index(group), tables.index(group), pred=wanted
    )


@gluon.jit
def _window(
    x_ptr, head_scale_ptr, out_ptr, table_desc, weights, proj, vectors, x_tiles, scratch, tables,
    tables_ready, image, window_row, window_col, kind, next_image, next_row, next_col, next_kind,
    more, seen, scale, eps, H, W, GROUP: gl.constexpr, LOOP: gl.constexpr, C: gl.constexpr,
    WIDTH: gl.constexpr, NH: gl.constexpr, N: gl.constexpr, WH: gl.constexpr, WW: gl.constexpr,
    SH: gl.constexpr, SW: gl.constexpr, COSINE: gl.constexpr, NORM_FIRST: gl.constexpr,
):  # fmt: skip
    """One window, whose rows and first table have been asked for, the group's ``seen``-th table.

    Its follower's are asked for meanwhile, if there are ``more``.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    PARTS: gl.constexpr = C // WIDTH
    by_head = vectors._reinterpret(gl.float32, [vectors.shape[0] // HEAD, 1, HEAD], row_layout())
    by_part = vectors._reinterpret(gl.float32, [vectors.shape[0] // WIDTH, 1, WIDTH], row_layout())
    keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD], dtype)
    kv = scratch.index(GROUP)._reinterpret(dtype, [2, 64, HEAD], keys)
    async_copy.wait_group(0)
    tl.debug_barrier()  # all threads' copies are there
    x = ()
    for part in gl.static_range(PARTS):
        x += (x_tiles.index(GROUP * PARTS + part).load(operand(WIDTH)),)
    if LOOP:
        tl.debug_barrier()  # all warps have read all rows
        _fetch_window(
            x_ptr, x_tiles, GROUP * PARTS, next_image, next_row, next_col, more, H, W, C, WIDTH, N,
            WH, WW, SH, SW,
        )  # fmt: skip
    x, sums = begin_sums(x, by_part, eps, dtype, C, WIDTH, NORM_FIRST)
    o = gl.zeros([64, HEAD], dtype, operand(HEAD))
    for head in range(NH):
        head_scale = scale
        if COSINE:
            head_scale = gl.load(head_scale_ptr + head)
        q, k, v = project(x, weights, by_head, head, NH)
        # in front of the first head o is 0: a third of proj more, beside products that take longer
        sums = project_back(o, proj, gl.maximum(head - 1, 0), sums, WIDTH)
        mbarrier.wait(tables_ready.index(GROUP), (seen + head) % 2)
        table = tables.index(GROUP).load(accumulator(64))
        tl.debug_barrier()  # all warps have read the table, and the head's before keys and values
        last = (head + 1) // NH
        wanted = (kind + last * (next_kind - kind)) * NH + (head + 1) % NH
        _request_table(table_desc, tables, tables_ready, GROUP, wanted, (last == 0) | more)
        done = warpgroup_mma_wait(0, deps=(q, k, v) + sums)  # noqa: RUF005
        sums = done[3:]
        o = attend(
            done[0], done[1], done[2], kv.index(0), kv.index(1), table, head_scale, dtype, COSINE
        )
        o = gl.convert_layout(o.to(dtype), operand(HEAD), assert_trivial=True)
    sums = project_back(o, proj, NH - 1, sums, WIDTH)
    sums = warpgroup_mma_wait(0, deps=sums)
    sums = end_sums(x, sums, by_part, eps, C, WIDTH, NORM_FIRST)
    pointers = _pointers(
        out_ptr, image, window_row, window_col, H, W, C, WIDTH, WH, WW, SH, SW
    )  # fmt: skip
    live = (gl.arange(0, 64, gl.SliceLayout(1, _copies(WIDTH))) < N)[:, None]
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH], dtype)
    staged = scratch.index(GROUP)._reinterpret(dtype, [64 // WIDTH, 64, WIDTH], square)
    for part in gl.static_range(PARTS):
        tile = staged.index(part % (64 // WIDTH))
        tl.debug_barrier()  # all warps have read what the tile held
        tile.store(sums[part].to(dtype))
        tl.debug_barrier()
        gl.store(pointers + part * WIDTH, tile.load(_copies(WIDTH)), mask=live)


@gluon.jit
def _walk(
    x_ptr, head_scale_ptr, out_ptr, table_desc, weights, proj, vectors, x_tiles, scratch, tables,
    ready, tables_ready, scale, eps, H, W, windows_per_col, windows_per_row, windows, share,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, LOOP: gl.constexpr, C: gl.constexpr,
    WIDTH: gl.constexpr, NH: gl.constexpr, N: gl.constexpr, WH: gl.constexpr, WW: gl.constexpr,
    SH: gl.constexpr, SW: gl.constexpr, COSINE: gl.constexpr, NORM_FIRST: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """A warp group's windows: the GROUP-th of the program's share and every GROUPS-th behind it."""
    PARTS: gl.constexpr = C // WIDTH
    begin = gl.program_id(0) * share
    after = gl.minimum(begin + share, windows)
    begin += GROUP
    there = begin < after
    image, row, col, kind = locate_window(
        begin, windows_per_col, windows_per_row, SH + SW > 0, False
    )  # fmt: skip
    _request_table(table_desc, tables, tables_ready, GROUP, kind * NH, there)
    wait_for_previous(PDL)
    _fetch_window(
        x_ptr, x_tiles, GROUP * PARTS, image, row, col, there, H, W, C, WIDTH, N, WH, WW, SH, SW
    )  # fmt: skip
    mbarrier.wait(ready.index(0), 0)
    if LOOP:
        for i in range(gl.cdiv(after - begin, GROUPS)):
            follower = begin + (i + 1) * GROUPS
            next_image, next_row, next_col, next_kind = locate_window(
                follower, windows_per_col, windows_per_row, SH + SW > 0, False
            )
            _window(
                x_ptr, head_scale_ptr, out_ptr, table_desc, weights, proj, vectors, x_tiles,
                scratch, tables, tables_ready, image, row, col, kind, next_image, next_row,
                next_col, next_kind, follower < after, i * NH, scale, eps, H, W, GROUP, LOOP, C,
                WIDTH, NH, N, WH, WW, SH, SW, COSINE, NORM_FIRST,
            )  # fmt: skip
            image = next_image
            row = next_row
            col = next_col
            kind = next_kind
    elif there:
        _window(
            x_ptr, head_scale_ptr, out_ptr, table_desc, weights, proj, vectors, x_tiles, scratch,
            tables, tables_ready, image, row, col, kind, image, row, col, kind, False, 0, scale,
            eps, H, W, GROUP, LOOP, C, WIDTH, NH, N, WH, WW, SH, SW, COSINE, NORM_FIRST,
        )  # fmt: skip
    async_copy.wait_group(0)


@gluon.jit
def _request_weights(
    qkv_desc, proj_desc, qkv_blocks, proj_blocks, ready, C: gl.constexpr, WIDTH: gl.constexpr
):
    """Ask for all weights; a copy costs 75 ns, hence blocks of BLOCK rows, of which some are 0."""
    nbytes: gl.constexpr = C // WIDTH * BLOCKS * qkv_desc.block_type.nbytes
    mbarrier.expect(ready.index(0), nbytes + C // HEAD * proj_desc.block_type.nbytes)
    for part in gl.static_range(C // WIDTH):
        for block in gl.static_range(BLOCKS):
            tma.async_copy_global_to_shared(
                qkv_desc, [block * BLOCK, part * WIDTH], ready.index(0),
                qkv_blocks.index(part * BLOCKS + block),
            )  # fmt: skip
    for head in gl.static_range(C // HEAD):
        tma.async_copy_global_to_shared(
            proj_desc, [0, head * HEAD], ready.index(0), proj_blocks.index(head)
        )


@gluon.jit(
    do_not_specialize=["H", "W", "windows_per_col", "windows_per_row", "windows", "share"]
)  # fmt: skip
def _hopper_whole_kernel(
    x_ptr, qkv_desc, proj_desc, table_desc, vectors_ptr, head_scale_ptr, out_ptr,
    scale, eps, H, W, windows_per_col, windows_per_row, windows, share,
    C: gl.constexpr, WIDTH: gl.constexpr, NH: gl.constexpr, N: gl.constexpr, WH: gl.constexpr,
    WW: gl.constexpr, SH: gl.constexpr, SW: gl.constexpr, COSINE: gl.constexpr,
    NORM_FIRST: gl.constexpr, VALUES: gl.constexpr, GROUPS: gl.constexpr, LOOP: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Windows ``program * share`` and on; the launch's warps are a group.

    LOOP says that a group has several windows. VALUES: of the vectors, to a power of two.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    PARTS: gl.constexpr = C // WIDTH
    qkv_blocks = buffers(qkv_desc, PARTS * BLOCKS)
    slab: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEAD, WIDTH], dtype)
    weights = qkv_blocks._reinterpret(
        dtype, [PARTS * BLOCKS * BLOCK // HEAD, HEAD, WIDTH], slab
    )  # fmt: skip
    proj_blocks = buffers(proj_desc, NH)
    back: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WIDTH, HEAD], dtype)
    proj = proj_blocks._reinterpret(dtype, [NH * BLOCK // WIDTH, WIDTH, HEAD], back)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH], dtype)
    x_tiles = gl.allocate_shared_memory(dtype, [GROUPS * PARTS, 64, WIDTH], square)
    whole: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    scratch = gl.allocate_shared_memory(dtype, [GROUPS, 64, 64], whole)
    tables = buffers(table_desc, GROUPS)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    vectors = gl.allocate_shared_memory(gl.float32, [VALUES], line)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    tables_ready = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    for group in gl.static_range(GROUPS):
        mbarrier.init(tables_ready.index(group), count=1)
    fence_async_shared()
    _request_weights(qkv_desc, proj_desc, qkv_blocks, proj_blocks, ready, C, WIDTH)
    at = gl.arange(0, VALUES, gl.BlockedLayout([4], [32], [4], [0]))
    vectors.store(gl.load(vectors_ptr + at, mask=at < 6 * C, other=0.0))
    if GROUPS == 1:
        tl.debug_barrier()
        _walk(
            x_ptr, head_scale_ptr, out_ptr, table_desc, weights, proj, vectors, x_tiles, scratch,
            tables, ready, tables_ready, scale, eps, H, W, windows_per_col, windows_per_row,
            windows, share, 0, GROUPS, LOOP, C, WIDTH, NH, N, WH, WW, SH, SW, COSINE, NORM_FIRST,
            PDL,
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_walk, (
                    x_ptr, head_scale_ptr, out_ptr, table_desc, weights, proj, vectors, x_tiles,
                    scratch, tables, ready, tables_ready, scale, eps, H, W, windows_per_col,
                    windows_per_row, windows, share, part, GROUPS, LOOP, C, WIDTH, NH, N, WH, WW,
                    SH, SW, COSINE, NORM_FIRST, PDL,
                ))
                for part in ((0, 1) if GROUPS == 2 else (0, 1, 2))
            ],
            [4] if GROUPS == 2 else [4, 4],
            [REGISTERS] if GROUPS == 2 else [REGISTERS, REGISTERS],
        )  # fmt: skip
