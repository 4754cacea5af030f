"""A Swin block for few windows: a cluster of programs a window, one program a head.

    V1   x' = x + proj(attention(qkv(norm(x))))       out = x' + fc2(gelu(fc1(norm(x'))))
    V2   x' = x + norm1(proj(attention(qkv(x))))      out = x' + norm2(fc2(gelu(fc1(x'))))

    x, out [B, H, W, C]   heads [4C, C] (packing.py)   fc1 [4C, C]   fc2 [C, 4C]   C = 32 P
    table [kinds, P, 64, 64] (ops/window_attention/packing.py)   biases and norms fp32

At batch 1 a Swin is bound by launches. A block is a function of single windows, so the P programs
of a window need nobody else. Program h owns head h, columns 32 h to 32 h + 31 of the stream and
hidden units 128 h to 128 h + 127; it holds its weights for the whole block, 768 C bytes, asked for
before the kernel in front has ended. A window's rows are the 64 of a product. Pieces of 32 columns,
which a product leaves in registers and the next takes from there, cross to all (exchange.py):

    norm, q, k, v, attention -> all: proj, residual -> all: norm, fc1, GELU, fc2 with these hidden
    units only -> sums of columns 32 j to program j: residual

24 C**2 FLOPs a token; 16 P KB cross to every program and x is read P times from L2. V1's second
norm and V2's cross as mean and squared deviations of each piece's rows.

Sums take the places of attention's pieces and of those of x', so programs send them behind a
barrier of the cluster at which all have read both.
"""

from __future__ import annotations

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
    cluster_arrive,
    cluster_wait,
    expect_bytes,
    joined_statistics,
    part_statistics,
    send_statistics,
    tail_address,
    wait_bytes,
)
from fastswin._triton.gluon_tiles import accumulator, buffers
from fastswin._triton.math import gelu
from fastswin._triton.pdl import wait_for_previous
from fastswin.ops.swin_block.exchange import (
    receive_piece,
    receive_sums,
    send_piece,
    send_sums,
)
from fastswin.ops.window_attention.hopper_tile import HEAD, attend, operand, vector_row
from fastswin.ops.window_attention.tile import locate_window, token_rows

#: Hidden units of a program.
HIDDEN = gl.constexpr(128)
HALF = gl.constexpr(64)

#: Bytes of one program's row statistics.
STATISTICS = gl.constexpr(512)


@gluon.jit
def _normalized(piece, mean, rstd, NORMALIZE: gl.constexpr):
    """A piece of rows, laid out as a first operand, normalised where asked."""
    if NORMALIZE:
        wide = gl.convert_layout(piece, accumulator(HEAD), assert_trivial=True).to(gl.float32)
        wide = (wide - mean[:, None]) * rstd[:, None]
        piece = gl.convert_layout(wide.to(piece.dtype), operand(HEAD), assert_trivial=True)
    return piece


@gluon.jit
def _load_tiles(desc, tiles, ready, row, column, ROW_STEP: gl.constexpr, COLUMN_STEP: gl.constexpr):
    """All tiles of a buffer, from a matrix on the way that the steps say."""
    COUNT: gl.constexpr = tiles.shape[0]
    mbarrier.expect(ready, COUNT * desc.block_type.nbytes)
    for i in gl.static_range(COUNT):
        tma.async_copy_global_to_shared(
            desc, [row + i * ROW_STEP, column + i * COLUMN_STEP], ready, tiles.index(i)
        )


@gluon.jit
def _load_pieces(ptr, live, P: gl.constexpr):
    """Whole rows as P pieces of 32 columns, 0 where not live."""
    pieces = (gl.load(ptr, mask=live, other=0.0),)
    for r in gl.static_range(1, P):
        pieces = pieces + (gl.load(ptr + r * HEAD, mask=live, other=0.0),)  # noqa: RUF005
    return pieces


@gluon.jit
def _row_statistics(pieces, eps, P: gl.constexpr):
    """Mean and 1 / deviation of rows, the mean first so that large offsets do not cancel."""
    total = pieces[0].to(gl.float32)
    for r in gl.static_range(1, P):
        total += pieces[r].to(gl.float32)
    mean = gl.sum(total, 1) / (HEAD * P)
    square = gl.zeros_like(total)
    for r in gl.static_range(P):
        apart = pieces[r].to(gl.float32) - mean[:, None]
        square += apart * apart
    return mean, gl.rsqrt(gl.sum(square, 1) / (HEAD * P) + eps)


@gluon.jit
def _send_rows(x, to_address, barrier, rank, P: gl.constexpr, THREADS: gl.constexpr):
    """A program's columns to all of its cluster, beginning with itself."""
    piece = gl.convert_layout(x, operand(HEAD), assert_trivial=True)
    for r in gl.static_range(P):
        send_piece(piece, to_address + rank * (32 * THREADS), barrier, (rank + r) % P, THREADS)


@gluon.jit
def _send_statistics(
    mean, deviations, to_address, barrier, row, rank, P: gl.constexpr, N: gl.constexpr
):
    """What :func:`part_statistics` says of a program's columns, to all of its cluster."""
    for r in gl.static_range(P):
        send_statistics(
            mean, deviations, to_address + rank * STATISTICS, barrier, (rank + r) % P, row, N
        )


@gluon.jit
def _norm_behind(
    y, weight, bias, statistics, barrier, row, rank, eps, P: gl.constexpr, N: gl.constexpr
):
    """V2's LayerNorm of rows whose columns lie in P programs."""
    mean, deviations = part_statistics(y, HEAD)
    _send_statistics(mean, deviations, statistics, barrier, row, rank, P, N)
    wait_bytes(barrier)
    mean, rstd = joined_statistics(statistics, row, eps, HEAD, P, STATISTICS)
    return (y - mean[:, None]) * rstd[:, None] * weight + bias


@gluon.jit
def _hidden(pieces, fc1, bias, PART: gl.constexpr, P: gl.constexpr):
    """Half of a program's hidden units before GELU, under way."""
    h = gl.zeros([64, HALF], gl.float32, accumulator(HALF)) + bias
    for r in gl.static_range(P):
        h = warpgroup_mma(pieces[r], fc1.index(2 * r + PART).permute((1, 0)), h, is_async=True)
    return h


@gluon.jit
def _add_sums(sums, h, fc2, rank, PART: gl.constexpr, P: gl.constexpr):
    """What half of the hidden units adds to the columns of all programs, under way."""
    more = (warpgroup_mma(h, fc2.index(2 * rank + PART).permute((1, 0)), sums[0], is_async=True),)
    for r in gl.static_range(1, P):
        weight = fc2.index(2 * ((rank + r) % P) + PART).permute((1, 0))
        more = more + (warpgroup_mma(h, weight, sums[r], is_async=True),)  # noqa: RUF005
    return more


@gluon.jit(do_not_specialize=["H", "W", "windows_per_col", "windows_per_row"])
def _swin_block_kernel(
    x_ptr, qkv_bias_ptr, proj_bias_ptr, fc1_bias_ptr, fc2_bias_ptr, table_ptr, head_scale_ptr,
    norm1_weight_ptr, norm1_bias_ptr, norm2_weight_ptr, norm2_bias_ptr, out_ptr,
    heads_desc, fc1_desc, fc2_desc, scale, eps, H, W, windows_per_col, windows_per_row,
    P: gl.constexpr, N: gl.constexpr, WH: gl.constexpr, WW: gl.constexpr, SH: gl.constexpr,
    SW: gl.constexpr, V2: gl.constexpr, THREADS: gl.constexpr, TAIL: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Program ``window * P + head``; ``out`` may be ``x``, which all read before one writes."""
    C: gl.constexpr = HEAD * P
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    acc: gl.constexpr = accumulator(HEAD)
    head = gl.program_id(0) % P
    own = head * HEAD
    barriers = tail_address(TAIL)
    statistics1 = barriers + 128
    statistics2 = statistics1 + P * STATISTICS
    rows1 = statistics2 + P * STATISTICS
    rows2 = rows1 + P * THREADS * 32
    rows_bytes: gl.constexpr = P * THREADS * 32
    statistics_bytes: gl.constexpr = P * N * 8
    expect_bytes(barriers, rows_bytes)
    expect_bytes(barriers + 8, rows_bytes + (0 if V2 else statistics_bytes))
    expect_bytes(barriers + 16, 2 * rows_bytes)
    if V2:
        expect_bytes(barriers + 24, statistics_bytes)
        expect_bytes(barriers + 32, statistics_bytes)
    cluster_arrive()
    heads_tiles = buffers(heads_desc, P)
    fc1_tiles = buffers(fc1_desc, P)
    fc2_tiles = buffers(fc2_desc, P)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEAD, HEAD], dtype)
    heads_weight = heads_tiles._reinterpret(dtype, [4 * P, HEAD, HEAD], narrow)
    fc1_weight = fc1_tiles._reinterpret(dtype, [2 * P, HALF, HEAD], narrow)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEAD, HALF], dtype)
    fc2_weight = fc2_tiles._reinterpret(dtype, [2 * P, HEAD, HALF], wide)
    keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD], dtype)
    k_buffer = gl.allocate_shared_memory(dtype, [64, HEAD], keys)
    v_buffer = gl.allocate_shared_memory(dtype, [64, HEAD], keys)
    ready = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    _load_tiles(heads_desc, heads_tiles, ready.index(0), head * HIDDEN, 0, 0, HEAD)
    image, window_row, window_col, kind = locate_window(
        gl.program_id(0) // P, windows_per_col, windows_per_row, SH + SW > 0, False
    )
    row = gl.arange(0, 64, gl.SliceLayout(1, acc))
    at = token_rows(window_row, window_col, row, H, W, WH, WW, SH, SW, False, False, False) * C
    place = image * H * W * C + at[:, None] + gl.arange(0, HEAD, gl.SliceLayout(0, acc))[None, :]
    live = (row < N)[:, None]
    query = gl.arange(0, 64, gl.SliceLayout(1, accumulator(64)))
    key = gl.arange(0, 64, gl.SliceLayout(0, accumulator(64)))
    table = gl.load(table_ptr + (kind * P + head) * 4096 + query[:, None] * 64 + key[None, :])
    if V2:
        scale = gl.load(head_scale_ptr + head)
    q_bias = vector_row(qkv_bias_ptr, own, HEAD)
    k_bias = vector_row(qkv_bias_ptr, C + own, HEAD)
    v_bias = vector_row(qkv_bias_ptr, 2 * C + own, HEAD)
    cluster_wait()
    wait_for_previous(PDL)

    pieces = _load_pieces(x_ptr + place, live, P)
    # while x is on its way: a copy takes 30 to 80 cycles to ask for
    _load_tiles(fc1_desc, fc1_tiles, ready.index(1), head * HIDDEN, 0, 0, HEAD)
    _load_tiles(fc2_desc, fc2_tiles, ready.index(2), 0, head * HIDDEN, HEAD, 0)
    mean = gl.zeros_like(row).to(gl.float32)
    rstd = mean
    if not V2:
        mean, rstd = _row_statistics(pieces, eps, P)
    mbarrier.wait(ready.index(0), 0)
    q = gl.zeros([64, HEAD], gl.float32, acc) + q_bias
    k = gl.zeros([64, HEAD], gl.float32, acc) + k_bias
    v = gl.zeros([64, HEAD], gl.float32, acc) + v_bias
    for r in gl.static_range(P):
        piece = gl.convert_layout(pieces[r], operand(HEAD), assert_trivial=True)
        piece = _normalized(piece, mean, rstd, not V2)
        q = warpgroup_mma(piece, heads_weight.index(4 * r).permute((1, 0)), q, is_async=True)
        k = warpgroup_mma(piece, heads_weight.index(4 * r + 1).permute((1, 0)), k, is_async=True)
        v = warpgroup_mma(piece, heads_weight.index(4 * r + 2).permute((1, 0)), v, is_async=True)
    q, k, v = warpgroup_mma_wait(0, deps=(q, k, v))
    o = attend(q, k, v, k_buffer, v_buffer, table, scale, dtype, V2)
    _send_rows(o.to(dtype), rows1, barriers, head, P, THREADS)

    y = gl.zeros([64, HEAD], gl.float32, acc) + vector_row(proj_bias_ptr, own, HEAD)
    x = gl.load(x_ptr + place + own, mask=live, other=0.0).to(gl.float32)
    if V2:
        norm_weight = vector_row(norm1_weight_ptr, own, HEAD)
        norm_bias = vector_row(norm1_bias_ptr, own, HEAD)
    wait_bytes(barriers)
    for r in gl.static_range(P):
        piece = receive_piece(rows1 + r * (32 * THREADS), dtype, THREADS, operand(HEAD))
        y = warpgroup_mma(piece, heads_weight.index(4 * r + 3).permute((1, 0)), y, is_async=True)
    y = warpgroup_mma_wait(0, deps=(y,))
    if V2:
        y = _norm_behind(
            y, norm_weight, norm_bias, statistics1, barriers + 24, row, head, eps, P, N
        )
    x += y
    rounded = x.to(dtype)
    _send_rows(rounded, rows2, barriers + 8, head, P, THREADS)
    if not V2:
        mean, deviations = part_statistics(rounded.to(gl.float32), HEAD)
        _send_statistics(mean, deviations, statistics2, barriers + 8, row, head, P, N)

    bias1 = vector_row(fc1_bias_ptr, head * HIDDEN, HALF)
    bias2 = vector_row(fc1_bias_ptr, head * HIDDEN + HALF, HALF)
    mbarrier.wait(ready.index(1), 0)
    wait_bytes(barriers + 8)
    if not V2:
        mean, rstd = joined_statistics(statistics2, row, eps, HEAD, P, STATISTICS)
    piece = receive_piece(rows2, dtype, THREADS, operand(HEAD))
    pieces = (_normalized(piece, mean, rstd, not V2),)
    for r in gl.static_range(1, P):
        piece = receive_piece(rows2 + r * (32 * THREADS), dtype, THREADS, operand(HEAD))
        pieces = pieces + (_normalized(piece, mean, rstd, not V2),)  # noqa: RUF005
    h1 = _hidden(pieces, fc1_weight, bias1, 0, P)
    h2 = _hidden(pieces, fc1_weight, bias2, 1, P)
    cluster_arrive()
    sums = (gl.zeros([64, HEAD], gl.float32, acc),)
    for _ in gl.static_range(1, P):
        sums = sums + (gl.zeros([64, HEAD], gl.float32, acc),)  # noqa: RUF005
    y = gl.zeros([64, HEAD], gl.float32, acc) + vector_row(fc2_bias_ptr, own, HEAD)
    if V2:
        norm_weight = vector_row(norm2_weight_ptr, own, HEAD)
        norm_bias = vector_row(norm2_bias_ptr, own, HEAD)
    mbarrier.wait(ready.index(2), 0)
    h1, h2 = warpgroup_mma_wait(P, deps=(h1, h2))
    h = gl.convert_layout(gelu(h1).to(dtype), operand(HALF), assert_trivial=True)
    h2 = warpgroup_mma_wait(0, deps=(h2,))
    sums = _add_sums(sums, h, fc2_weight, head, 0, P)
    h = gl.convert_layout(gelu(h2).to(dtype), operand(HALF), assert_trivial=True)
    sums = _add_sums(sums, h, fc2_weight, head, 1, P)
    cluster_wait()
    sums = warpgroup_mma_wait(0, deps=sums)
    for r in gl.static_range(P):
        send_sums(sums[r], rows1 + head * (64 * THREADS), barriers + 16, (head + r) % P, THREADS)
    wait_bytes(barriers + 16)
    for r in gl.static_range(P):
        y += receive_sums(rows1 + r * (64 * THREADS), THREADS, acc)
    if V2:
        y = _norm_behind(
            y, norm_weight, norm_bias, statistics2, barriers + 32, row, head, eps, P, N
        )
    gl.store(out_ptr + place + own, (x + y).to(dtype), mask=live)
