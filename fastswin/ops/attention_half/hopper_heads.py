"""qkv and window attention of one window and head on Hopper, the weights in place before x is.

    x, out [B, H, W, C]   weight [3C, C]   vectors [3, 3C] fp32 (packing.py)   norm_stats
    [2, PARTS, B H W] fp32 (ops/linear/stats.py)   table [kinds, nH, 64, 64], head_scale [nH]
    (ops/window_attention/packing.py)

heads.py's problem for heads of 32 channels and windows of 49 to 64 tokens, where statistics of x's
rows are there or none are needed (V2). A program asks for its head's q, k and v weights, ``96 C``
values, through the copy engine before it waits for the kernel in front; behind the wait the
window's rows, which no rectangle of the map holds once windows are shifted, come by 16 bytes a
thread, and all products read shared memory. LayerNorm stands behind the products:

    norm(x) @ W.T = rstd * (x @ W.T - mean * W.sum(1))

6 N C D FLOPs of projections a head and window; ``128 C`` bytes fetched behind the wait, where
heads.py fetches ``320 C``.
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
from fastswin._triton.pdl import launch_dependents, wait_for_previous
from fastswin._triton.row_statistics import joined_stats
from fastswin.ops.window_attention.hopper_tile import HEAD, attend, vector_row
from fastswin.ops.window_attention.tile import locate_window, token_rows

#: Channels of a step: 128 bytes of a row.
STEP = gl.constexpr(64)


@gluon.constexpr_function
def _copies():
    """Layout in which threads fetch 64 rows of 64 channels, eight of them a row."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def _fetch(x_ptr, live, tiles, FIRST: gl.constexpr, AFTER: gl.constexpr):
    """Steps of rows into their tiles, one group of copies."""
    for step in gl.static_range(FIRST, AFTER):
        async_copy.async_copy_global_to_shared(tiles.index(step), x_ptr + step * STEP, mask=live)
    async_copy.commit_group()


@gluon.jit
def _wait_copies(BEHIND: gl.constexpr):
    """Until all but the last groups of all threads' copies are there for the tensor cores."""
    async_copy.wait_group(BEHIND)
    fence_async_shared()
    tl.debug_barrier()


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
    PDL: gl.constexpr,
):  # fmt: skip
    """Program ``window * NH + head``; without PARTS rows are taken as they are."""
    launch_dependents(PDL)
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    STEPS: gl.constexpr = C // STEP
    acc: gl.constexpr = accumulator(HEAD)
    first = gl.program_id(0) % NH * HEAD
    weights = buffers(weight_desc, 3 * STEPS)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, STEP], dtype)
    x_tiles = gl.allocate_shared_memory(dtype, [STEPS, 64, STEP], square)
    keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD], dtype)
    k_buffer = gl.allocate_shared_memory(dtype, [64, HEAD], keys)
    v_buffer = gl.allocate_shared_memory(dtype, [64, HEAD], keys)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    fence_async_shared()
    mbarrier.expect(ready.index(0), 3 * STEPS * weight_desc.block_type.nbytes)
    for step in gl.static_range(STEPS):
        for part in gl.static_range(3):
            tma.async_copy_global_to_shared(
                weight_desc, [part * C + first, step * STEP], ready.index(0),
                weights.index(3 * step + part),
            )  # fmt: skip

    image, window_row, window_col, kind = locate_window(
        gl.program_id(0) // NH, windows_per_col, windows_per_row, SH + SW > 0, False
    )
    token = gl.arange(0, 64, gl.SliceLayout(1, _copies()))
    at = token_rows(window_row, window_col, token, H, W, WH, WW, SH, SW, False, False, False) * C
    channel = gl.arange(0, STEP, gl.SliceLayout(0, _copies()))
    x_ptr += image * H * W * C + at[:, None] + channel[None, :]
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
    q_vectors = (vector_row(vectors_ptr, first, HEAD), vector_row(vectors_ptr, 3 * C + first, HEAD))
    k_vectors = (
        vector_row(vectors_ptr, C + first, HEAD),
        vector_row(vectors_ptr, 4 * C + first, HEAD),
    )
    v_vectors = (
        vector_row(vectors_ptr, 2 * C + first, HEAD),
        vector_row(vectors_ptr, 5 * C + first, HEAD),
    )
    wait_for_previous(PDL)

    HALF: gl.constexpr = (STEPS + 1) // 2
    _fetch(x_ptr, inside, x_tiles, 0, HALF)
    _fetch(x_ptr, inside, x_tiles, HALF, STEPS)
    mean = gl.zeros_like(row).to(gl.float32)
    rstd = mean
    if PARTS > 0:
        mean, rstd = joined_stats(
            norm_stats_ptr, image * H * W + place, live, tokens, eps, C, PARTS
        )
    q = gl.zeros([64, HEAD], gl.float32, acc)
    k = gl.zeros([64, HEAD], gl.float32, acc)
    v = gl.zeros([64, HEAD], gl.float32, acc)
    mbarrier.wait(ready.index(0), 0)
    for step in gl.static_range(STEPS):
        if step == 0:
            _wait_copies(1)
        elif step == HALF:
            _wait_copies(0)
        x = x_tiles.index(step)
        q = warpgroup_mma(x, weights.index(3 * step).permute((1, 0)), q, is_async=True)
        k = warpgroup_mma(x, weights.index(3 * step + 1).permute((1, 0)), k, is_async=True)
        v = warpgroup_mma(x, weights.index(3 * step + 2).permute((1, 0)), v, is_async=True)
    q, k, v = warpgroup_mma_wait(0, deps=(q, k, v))
    q = _projected(q, q_vectors, mean, rstd, PARTS > 0)
    k = _projected(k, k_vectors, mean, rstd, PARTS > 0)
    v = _projected(v, v_vectors, mean, rstd, PARTS > 0)
    o = attend(q, k, v, k_buffer, v_buffer, table.to(gl.float32), scale, dtype, N, COSINE)
    column = first + gl.arange(0, HEAD, gl.SliceLayout(0, acc))
    out_ptr += image * H * W * C + (place * C)[:, None] + column[None, :]
    gl.store(out_ptr, o.to(dtype), mask=live[:, None])
