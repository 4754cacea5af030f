"""qkv and window attention of one window and head on Hopper, the weights in place before x is.

    x, out [B, H, W, C]   weight [3C, C]   vectors [3, 3C] fp32 (packing.py)   norm_stats
    [2, PARTS, B H W] fp32 (ops/linear/stats.py)   table [kinds, nH, 64, 64], head_scale [nH]
    (ops/window_attention/packing.py)

heads.py's problem for heads of 32 channels and windows of 49 to 64 tokens, where statistics of x's
rows are there or none are needed (V2). A program asks for its head's q, k and v weights, ``96 C``
values, through the copy engine before it waits for the kernel in front. It does so in blocks of up
to 256 channels: a warp takes 75 ns to ask for 64 of them, and a block is asked for by as many warps
as it has 64s. Behind the wait the window's rows, which no rectangle of the map holds once windows
are shifted, come by 16 bytes a thread.

Rows enter the tensor cores from registers, so a tile of 64 rows and channels is free once all warps
have read it. Of 768 channels, whose weights leave room for 10 tiles of 12, the last two steps' rows
are asked into the first two tiles; keys and values take the next one. LayerNorm stands behind the
products:

    norm(x) @ W.T = rstd * (x @ W.T - mean * W.sum(1))

6 N C D FLOPs of projections a head and window; ``2 N C`` bytes fetched behind the wait, where
heads.py fetches ``2 N C + 192 C``.
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
from fastswin.ops.window_attention.hopper_tile import HEAD, attend, operand, vector_row
from fastswin.ops.window_attention.tile import locate_window, token_rows

#: Channels of a step: 128 bytes of a row.
STEP = gl.constexpr(64)


@gluon.constexpr_function
def _copies():
    """Layout in which threads fetch 64 rows of 64 channels, eight of them a row."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def _fetch(pointers, live, tiles, FIRST: gl.constexpr, SPAN: gl.constexpr, SLOTS: gl.constexpr):
    """Rows of SPAN steps into their tiles, 0 where not live, one group of copies."""
    for step in gl.static_range(FIRST, FIRST + SPAN):
        to = tiles[step % SLOTS]
        async_copy.async_copy_global_to_shared(to, pointers + step * STEP, mask=live)
    async_copy.commit_group()


@gluon.jit
def _read(tiles, TURN: gl.constexpr, TURNS: gl.constexpr, SPAN: gl.constexpr, SLOTS: gl.constexpr):
    """A turn's rows as first operands once they are there; the same twice of one step.

    All warps have read the turn before, whose tiles are filled again behind the wait for this one.
    """
    FILLED: gl.constexpr = SLOTS // SPAN
    AGAIN: gl.constexpr = min(max(TURN - 1, 0), TURNS - FILLED)
    async_copy.wait_group(FILLED + AGAIN - TURN - 1)
    tl.debug_barrier()
    first = tiles[TURN * SPAN % SLOTS].load(operand(HEAD))
    return first, first if SPAN == 1 else tiles[(TURN * SPAN + 1) % SLOTS].load(operand(HEAD))


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
    pointers, live, tiles, weights, ready, STEPS: gl.constexpr, SPAN: gl.constexpr,
    SLOTS: gl.constexpr, SLABS: gl.constexpr,
):  # fmt: skip
    """q, k and v of a window's rows, SPAN steps a turn, the last turn's products under way.

    A turn's rows are read from shared memory while the products of the turn before are under way.
    """
    TURNS: gl.constexpr = STEPS // SPAN
    acc: gl.constexpr = accumulator(HEAD)
    q = gl.zeros([64, HEAD], gl.float32, acc)
    k = gl.zeros([64, HEAD], gl.float32, acc)
    v = gl.zeros([64, HEAD], gl.float32, acc)
    x = _read(tiles, 0, TURNS, SPAN, SLOTS)
    for turn in gl.static_range(TURNS):
        for i in gl.static_range(SPAN):
            q, k, v = _start(x[i], weights, ready, turn * SPAN + i, SLABS, q, k, v)
        if turn + 1 < TURNS:
            x = _read(tiles, turn + 1, TURNS, SPAN, SLOTS)
        if turn * SPAN < STEPS - SLOTS:
            _fetch(pointers, live, tiles, SLOTS + turn * SPAN, SPAN, SLOTS)
        if turn + 1 < TURNS:
            q, k, v = warpgroup_mma_wait(0, deps=(q, k, v))
    return q, k, v


@gluon.jit
def _vectors(vectors_ptr, column, C: gl.constexpr):
    """A head's bias, and sums of its weights' rows."""
    return vector_row(vectors_ptr, column, HEAD), vector_row(vectors_ptr, 3 * C + column, HEAD)


@gluon.jit
def _projected(acc, vectors, mean, rstd, NORMALIZE: gl.constexpr):
    """Behind a product: LayerNorm by its rows' statistics, and the bias."""
    bias, sums = vectors
    if NORMALIZE:
        acc = (acc - mean[:, None] * sums) * rstd[:, None]
    return acc + bias


@gluon.jit(do_not_specialize=["H", "W", "windows_per_col", "windows_per_row", "tokens"])
def _hopper_heads_kernel(
    x_ptr, weight_desc, vectors_ptr, table_ptr, head_scale_ptr, out_ptr, norm_stats_ptr, scale,
    eps, H, W, windows_per_col, windows_per_row, tokens,
    C: gl.constexpr, NH: gl.constexpr, N: gl.constexpr, WH: gl.constexpr, WW: gl.constexpr,
    SH: gl.constexpr, SW: gl.constexpr, COSINE: gl.constexpr, PARTS: gl.constexpr,
    SPAN: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program ``window * NH + head``; without PARTS rows are taken as they are."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    STEPS: gl.constexpr = C // STEP
    WIDTH: gl.constexpr = weight_desc.block_type.shape[1]
    BLOCKS: gl.constexpr = C // WIDTH
    acc: gl.constexpr = accumulator(HEAD)
    first = gl.program_id(0) % NH * HEAD
    blocks = buffers(weight_desc, 3 * BLOCKS)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, STEP], dtype)
    x_tiles = (gl.allocate_shared_memory(dtype, [64, STEP], square),)
    for _ in gl.static_range(SLOTS - 1):  # of one allocation each copy would wait for all warps
        x_tiles += (gl.allocate_shared_memory(dtype, [64, STEP], square),)
    ready = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], mbarrier.MBarrierLayout())
    for block in gl.static_range(BLOCKS):
        mbarrier.init(ready.index(block), count=1)
    fence_async_shared()
    for block in gl.static_range(BLOCKS):
        mbarrier.expect(ready.index(block), 3 * weight_desc.block_type.nbytes)
        for part in gl.static_range(3):
            tma.async_copy_global_to_shared(
                weight_desc, [part * C + first, block * WIDTH], ready.index(block),
                blocks.index(3 * block + part),
            )  # fmt: skip
    slab: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEAD, STEP], dtype)
    weights = blocks._reinterpret(dtype, [3 * STEPS, HEAD, STEP], slab)

    image, window_row, window_col, kind = locate_window(
        gl.program_id(0) // NH, windows_per_col, windows_per_row, SH + SW > 0, False
    )
    token = gl.arange(0, 64, gl.SliceLayout(1, _copies()))
    at = token_rows(window_row, window_col, token, H, W, WH, WW, SH, SW, False, False, False) * C
    channel = gl.arange(0, STEP, gl.SliceLayout(0, _copies()))
    pointers = x_ptr + image * H * W * C + (at[:, None] + channel[None, :])
    inside = (token < N)[:, None]
    row = gl.arange(0, 64, gl.SliceLayout(1, acc))
    place = token_rows(window_row, window_col, row, H, W, WH, WW, SH, SW, False, False, False)
    live = row < N
    query = gl.arange(0, 64, gl.SliceLayout(1, accumulator(64)))
    key = gl.arange(0, 64, gl.SliceLayout(0, accumulator(64)))
    table_ptr += kind * NH * 4096 + first * (4096 // HEAD)
    table = gl.load(table_ptr + query[:, None] * 64 + key[None, :])
    if COSINE:
        scale = gl.load(head_scale_ptr + first // HEAD)
    q_vectors = _vectors(vectors_ptr, first, C)
    k_vectors = _vectors(vectors_ptr, C + first, C)
    v_vectors = _vectors(vectors_ptr, 2 * C + first, C)
    wait_for_previous(PDL)

    for turn in gl.static_range(SLOTS // SPAN):
        _fetch(pointers, inside, x_tiles, turn * SPAN, SPAN, SLOTS)
    mean = gl.zeros_like(row).to(gl.float32)
    rstd = mean
    if PARTS > 0:
        means, squares = load_stats(norm_stats_ptr, image * H * W + place, live, tokens, PARTS)
    q, k, v = _multiply(
        pointers, inside, x_tiles, weights, ready, STEPS, SPAN, SLOTS, WIDTH // STEP
    )
    if PARTS > 0:
        mean, rstd = join_stats(means, squares, eps, C, PARTS)
    q, k, v = warpgroup_mma_wait(0, deps=(q, k, v))
    q = _projected(q, q_vectors, mean, rstd, PARTS > 0)
    k = _projected(k, k_vectors, mean, rstd, PARTS > 0)
    v = _projected(v, v_vectors, mean, rstd, PARTS > 0)
    keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD], dtype)
    kv = x_tiles[STEPS - SLOTS]._reinterpret(dtype, [2, 64, HEAD], keys)
    o = attend(q, k, v, kv.index(0), kv.index(1), table, scale, dtype, COSINE)
    column = first + gl.arange(0, HEAD, gl.SliceLayout(0, acc))
    out_ptr += image * H * W * C + (place * C)[:, None] + column[None, :]
    gl.store(out_ptr, o.to(dtype), mask=live[:, None])
