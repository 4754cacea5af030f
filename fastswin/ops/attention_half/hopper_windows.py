"""qkv and window attention of one head and several windows on Hopper, its weights fetched once.

    x, out [B, H, W, C]   weight [3C, C]   vectors [3, 3C] fp32 (packing.py)   norm_stats
    [2, PARTS, B H W] fp32 (ops/linear/stats.py) or none   table [kinds, nH, 64, 64],
    head_scale [nH] (ops/window_attention/packing.py)

hopper_heads.py's problem where windows are many: its programs fetch ``192 C`` bytes of weights for
``128 C`` of rows. Here a program takes one head of SHARE windows, at most one program a
multiprocessor, and asks for the head's weights once, before it waits for the kernel in front. Each
of GROUPS warp groups takes every GROUPS-th of the windows with rows of its own in shared memory;
they share the weights alone, so that one group's softmax stands beside another's products:

    q, k, v = rstd * (x @ W.T - mean * W.sum(1)) + b      o = softmax(q k' scale + table) v

Rows come by 16 bytes a thread, since no rectangle of the map holds a shifted window's. They enter
the tensor cores from registers: three products of 32 columns that each read 64 rows from shared
memory would take half as long again. Where nothing in front has left statistics, mean and deviation
are computed from the same registers while the products run.

6 N C D FLOPs of projections a head and window; ``192 C + 128 C SHARE`` bytes a program, of which
``192 C`` come ahead. Statistics that every head repeats: 4 instructions a value.
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

from fastswin._triton.gluon_tiles import accumulator, buffers
from fastswin._triton.pdl import wait_for_previous
from fastswin._triton.row_statistics import join_stats, load_stats
from fastswin.ops.attention_half.hopper_vectors import keep_vectors, projected
from fastswin.ops.window_attention.hopper_tile import HEAD, attend, operand
from fastswin.ops.window_attention.tile import locate_window, token_rows

#: Channels of a step: 128 bytes of a row.
STEP = gl.constexpr(64)


@gluon.constexpr_function
def _copies():
    """Layout in which threads fetch 64 rows of 64 channels, eight of them a row."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def _fetch(pointers, live, tiles, first, FIRST: gl.constexpr, AFTER: gl.constexpr):
    """Steps of rows into their tiles, 0 where not live, one group of copies, which may be empty."""
    for step in gl.static_range(FIRST, AFTER):
        async_copy.async_copy_global_to_shared(
            tiles.index(first + step), pointers + step * STEP, mask=live
        )
    async_copy.commit_group()


@gluon.jit
def _fetch_window(
    x_ptr, tiles, first, window, after, H, W, windows_per_col, windows_per_row,
    WHICH: gl.constexpr, C: gl.constexpr, N: gl.constexpr, WH: gl.constexpr, WW: gl.constexpr,
    SH: gl.constexpr, SW: gl.constexpr,
):  # fmt: skip
    """Ask a window's rows into the tiles from ``first`` on, none of one that is not before after.

    Three groups of copies, in the order in which they are read: half of the steps behind step 0,
    the others, and step 0. WHICH: 0 all, 1 the first two, 2 the third.
    """
    STEPS: gl.constexpr = C // STEP
    HALF: gl.constexpr = 1 + STEPS // 2
    image, window_row, window_col, _ = locate_window(
        gl.minimum(window, after - 1), windows_per_col, windows_per_row, SH + SW > 0, False
    )
    token = gl.arange(0, 64, gl.SliceLayout(1, _copies()))
    at = token_rows(window_row, window_col, token, H, W, WH, WW, SH, SW, False, False, False) * C
    channel = gl.arange(0, STEP, gl.SliceLayout(0, _copies()))
    x_ptr += image * H * W * C + at[:, None] + channel[None, :]
    live = (token < N)[:, None] & (window < after)
    if WHICH < 2:
        _fetch(x_ptr, live, tiles, first, 1, HALF)
        _fetch(x_ptr, live, tiles, first, HALF, STEPS)
    if WHICH != 1:
        _fetch(x_ptr, live, tiles, first, 0, 1)


@gluon.jit
def _wait_copies(BEHIND: gl.constexpr):
    """Until all but the last groups of all threads' copies are there."""
    async_copy.wait_group(BEHIND)
    tl.debug_barrier()


@gluon.jit
def _values(x):
    """A step's rows, which a product reads from registers, in fp32; a row stays in its threads."""
    return gl.convert_layout(x, accumulator(STEP), assert_trivial=True).to(gl.float32)


@gluon.jit
def _row_sums(values):
    """Sums of rows where LayerNorm behind a product has its rows."""
    sums = gl.sum(values, 1)
    return gl.convert_layout(sums, gl.SliceLayout(1, accumulator(HEAD)), assert_trivial=True)


@gluon.jit
def _start(x, weights, step, q, k, v):
    """The three products of a step of rows in registers, under way."""
    q = warpgroup_mma(x, weights.index(3 * step).permute((1, 0)), q, is_async=True)
    k = warpgroup_mma(x, weights.index(3 * step + 1).permute((1, 0)), k, is_async=True)
    v = warpgroup_mma(x, weights.index(3 * step + 2).permute((1, 0)), v, is_async=True)
    return q, k, v


@gluon.jit
def _multiply(
    tiles, first, weights, STEPS: gl.constexpr, HALF: gl.constexpr, BEHIND: gl.constexpr,
    MOMENTS: gl.constexpr,
):  # fmt: skip
    """The products of a window's rows and, with MOMENTS, its rows' mean and variance.

    A step's rows are fetched from shared memory, and summed up, while the products of the step
    before are under way: registers that a product reads must stay as they are until it has ended.
    Sums are around the mean of the first step's channels. The square of its distance from a row's
    mean is at most ``STEPS`` times the row's variance, so that no more than a digit is lost where
    it is taken off again.
    """
    acc: gl.constexpr = accumulator(HEAD)
    around: gl.constexpr = gl.SliceLayout(1, accumulator(STEP))
    q = gl.zeros([64, HEAD], gl.float32, acc)
    k = gl.zeros([64, HEAD], gl.float32, acc)
    v = gl.zeros([64, HEAD], gl.float32, acc)
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, acc))
    squares = total
    pivot = total
    pivot_around = gl.zeros([64], gl.float32, around)
    _wait_copies(BEHIND + 2)
    x = tiles.index(first + 1).load(operand(HEAD))
    if MOMENTS:
        values = _values(x)
        pivot = _row_sums(values) / STEP
        pivot_around = gl.convert_layout(pivot, around, assert_trivial=True)
        d = values - pivot_around[:, None]
        squares = _row_sums(d * d)
    if HALF == 2:
        _wait_copies(BEHIND + 1)
    if STEPS == 2:
        _wait_copies(BEHIND)
    for step in range(1, STEPS):
        q, k, v = _start(x, weights, step, q, k, v)
        follower = step + 1
        if step == STEPS - 1:
            follower = step * 0
        y = tiles.index(first + follower).load(operand(HEAD))
        if MOMENTS:
            d = _values(y) - pivot_around[:, None]
            total += _row_sums(d)
            squares += _row_sums(d * d)
        if step == HALF - 2:  # a branch, across which the assembler leaves sums where they are
            _wait_copies(BEHIND + 1)
        if step == STEPS - 2:
            _wait_copies(BEHIND)
        q, k, v = warpgroup_mma_wait(0, deps=(q, k, v))
        x = y
    q, k, v = _start(x, weights, 0, q, k, v)
    shift = total / (STEPS * STEP)
    variance = gl.maximum(squares / (STEPS * STEP) - shift * shift, 0.0)
    q, k, v = warpgroup_mma_wait(0, deps=(q, k, v))
    return q, k, v, pivot + shift, variance


@gluon.jit
def _window(
    x_ptr, table_ptr, out_ptr, norm_stats_ptr, weights, vectors, x_tiles, first, other, window,
    follower, after, head, scale, eps, H, W, windows_per_col, windows_per_row, tokens,
    BUFFERS: gl.constexpr, LOOP: gl.constexpr, C: gl.constexpr, NH: gl.constexpr, N: gl.constexpr,
    WH: gl.constexpr, WW: gl.constexpr, SH: gl.constexpr, SW: gl.constexpr, COSINE: gl.constexpr,
    NORMALIZE: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """One window, whose rows have been asked into the tiles from ``first`` on.

    Its follower's are asked into those from ``other`` on: at once where that is a second buffer,
    else behind the products, and step 0, whose tile holds keys and values, behind attention.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    STEPS: gl.constexpr = C // STEP
    HALF: gl.constexpr = 1 + STEPS // 2
    BEHIND: gl.constexpr = 3 * (BUFFERS - 1) * LOOP
    acc: gl.constexpr = accumulator(HEAD)
    image, window_row, window_col, kind = locate_window(
        window, windows_per_col, windows_per_row, SH + SW > 0, False
    )
    query = gl.arange(0, 64, gl.SliceLayout(1, accumulator(64)))
    key = gl.arange(0, 64, gl.SliceLayout(0, accumulator(64)))
    table_ptr += kind * NH * 4096 + head * 4096
    table = gl.load(table_ptr + query[:, None] * 64 + key[None, :])
    row = gl.arange(0, 64, gl.SliceLayout(1, acc))
    place = token_rows(window_row, window_col, row, H, W, WH, WW, SH, SW, False, False, False)
    live = row < N
    if LOOP and BUFFERS == 2:
        tl.debug_barrier()  # all warps have read the keys and values of the window before
        _fetch_window(
            x_ptr, x_tiles, other, follower, after, H, W, windows_per_col, windows_per_row, 0,
            C, N, WH, WW, SH, SW,
        )  # fmt: skip
    if PARTS > 0:
        means, squares = load_stats(norm_stats_ptr, image * H * W + place, live, tokens, PARTS)
    q, k, v, own_mean, variance = _multiply(
        x_tiles, first, weights, STEPS, HALF, BEHIND, NORMALIZE and PARTS == 0
    )
    if PARTS > 0:
        mean, rstd = join_stats(means, squares, eps, C, PARTS)
    else:
        mean = own_mean
        rstd = gl.rsqrt(variance + eps)
    tl.debug_barrier()  # all warps have read all rows
    if LOOP and BUFFERS == 1:
        _fetch_window(
            x_ptr, x_tiles, other, follower, after, H, W, windows_per_col, windows_per_row, 1,
            C, N, WH, WW, SH, SW,
        )  # fmt: skip
    q = projected(q, vectors, 0, mean, rstd, NORMALIZE)
    k = projected(k, vectors, 1, mean, rstd, NORMALIZE)
    v = projected(v, vectors, 2, mean, rstd, NORMALIZE)
    keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD], dtype)
    kv = x_tiles.index(first)._reinterpret(dtype, [2, 64, HEAD], keys)
    o = attend(q, k, v, kv.index(0), kv.index(1), table, scale, dtype, COSINE)
    if LOOP and BUFFERS == 1:
        tl.debug_barrier()  # all warps have read keys and values
        _fetch_window(
            x_ptr, x_tiles, other, follower, after, H, W, windows_per_col, windows_per_row, 2,
            C, N, WH, WW, SH, SW,
        )  # fmt: skip
    column = head * HEAD + gl.arange(0, HEAD, gl.SliceLayout(0, acc))
    out_ptr += image * H * W * C + (place * C)[:, None] + column[None, :]
    gl.store(out_ptr, o.to(dtype), mask=live[:, None])


@gluon.jit
def _walk(
    x_ptr, table_ptr, head_scale_ptr, out_ptr, norm_stats_ptr, weights, vectors, x_tiles, ready,
    scale, eps, H, W, windows_per_col, windows_per_row, tokens, windows, share,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, BUFFERS: gl.constexpr, LOOP: gl.constexpr,
    C: gl.constexpr, NH: gl.constexpr, N: gl.constexpr, WH: gl.constexpr, WW: gl.constexpr,
    SH: gl.constexpr, SW: gl.constexpr, COSINE: gl.constexpr, NORMALIZE: gl.constexpr,
    PARTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warp group's windows: the GROUP-th of the program's share and every GROUPS-th behind it."""
    STEPS: gl.constexpr = C // STEP
    TILE: gl.constexpr = GROUP * BUFFERS * STEPS
    head = gl.program_id(0) % NH
    begin = gl.program_id(0) // NH * share
    after = gl.minimum(begin + share, windows)
    begin += GROUP
    if COSINE:
        scale = gl.load(head_scale_ptr + head)
    wait_for_previous(PDL)
    _fetch_window(
        x_ptr, x_tiles, TILE, begin, after, H, W, windows_per_col, windows_per_row, 0, C, N, WH,
        WW, SH, SW,
    )  # fmt: skip
    mbarrier.wait(ready.index(0), 0)
    if LOOP:
        for i in range(gl.cdiv(after - begin, GROUPS)):
            first = TILE
            other = TILE
            if BUFFERS == 2:
                first += i % 2 * STEPS
                other += (i + 1) % 2 * STEPS
            window = begin + i * GROUPS
            _window(
                x_ptr, table_ptr, out_ptr, norm_stats_ptr, weights, vectors, x_tiles, first, other,
                window, window + GROUPS, after, head, scale, eps, H, W, windows_per_col,
                windows_per_row, tokens, BUFFERS, LOOP, C, NH, N, WH, WW, SH, SW, COSINE,
                NORMALIZE, PARTS,
            )  # fmt: skip
    elif begin < after:
        _window(
            x_ptr, table_ptr, out_ptr, norm_stats_ptr, weights, vectors, x_tiles, TILE, TILE,
            begin, begin, after, head, scale, eps, H, W, windows_per_col, windows_per_row, tokens,
            BUFFERS, LOOP, C, NH, N, WH, WW, SH, SW, COSINE, NORMALIZE, PARTS,
        )  # fmt: skip
    async_copy.wait_group(0)


@gluon.jit(
    do_not_specialize=[
        "H", "W", "windows_per_col", "windows_per_row", "tokens", "windows", "share",
    ]
)  # fmt: skip
def _hopper_windows_kernel(
    x_ptr, weight_desc, vectors_ptr, table_ptr, head_scale_ptr, out_ptr, norm_stats_ptr, scale,
    eps, H, W, windows_per_col, windows_per_row, tokens, windows, share,
    C: gl.constexpr, NH: gl.constexpr, N: gl.constexpr, WH: gl.constexpr, WW: gl.constexpr,
    SH: gl.constexpr, SW: gl.constexpr, COSINE: gl.constexpr, NORMALIZE: gl.constexpr,
    PARTS: gl.constexpr, GROUPS: gl.constexpr, BUFFERS: gl.constexpr, LOOP: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program ``g * NH + head``, windows ``g * share`` and on; the launch's warps are a group.

    LOOP says that a group has several windows. Without PARTS rows have no statistics yet.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    STEPS: gl.constexpr = C // STEP
    column = gl.program_id(0) % NH * HEAD
    weights = buffers(weight_desc, 3 * STEPS)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, STEP], dtype)
    x_tiles = gl.allocate_shared_memory(dtype, [GROUPS * BUFFERS * STEPS, 64, STEP], square)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    vectors = gl.allocate_shared_memory(gl.float32, [6, 1, HEAD], flat)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    fence_async_shared()
    mbarrier.expect(ready.index(0), 3 * STEPS * weight_desc.block_type.nbytes)
    for turn in gl.static_range(STEPS):
        step = (turn + 1) % STEPS
        for part in gl.static_range(3):
            tma.async_copy_global_to_shared(
                weight_desc, [part * C + column, step * STEP], ready.index(0),
                weights.index(3 * step + part),
            )  # fmt: skip
    keep_vectors(vectors, vectors_ptr, column, C)
    if GROUPS == 1:
        tl.debug_barrier()
        _walk(
            x_ptr, table_ptr, head_scale_ptr, out_ptr, norm_stats_ptr, weights, vectors, x_tiles,
            ready, scale, eps, H, W, windows_per_col, windows_per_row, tokens, windows, share,
            0, GROUPS, BUFFERS, LOOP, C, NH, N, WH, WW, SH, SW, COSINE, NORMALIZE, PARTS, PDL,
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_walk, (
                    x_ptr, table_ptr, head_scale_ptr, out_ptr, norm_stats_ptr, weights, vectors,
                    x_tiles, ready, scale, eps, H, W, windows_per_col, windows_per_row, tokens,
                    windows, share, part, GROUPS, BUFFERS, LOOP, C, NH, N, WH, WW, SH, SW, COSINE,
                    NORMALIZE, PARTS, PDL,
                ))
                for part in ((0, 1) if GROUPS == 2 else (0, 1, 2))
            ],
            [4] if GROUPS == 2 else [4, 4],
            [REGISTERS] if GROUPS == 2 else [REGISTERS, REGISTERS],
        )  # fmt: skip
