"""The phases of a block, each cut into at most one piece of work per program.

    norm        n = norm(x)                                  rows, for the first block
    attend      o = attention(n @ Wqkv' + b)                 one window and head
    project     x += o @ Wp' + b, statistics of x            [COLUMNS, ROWS] tiles
    expand      h = gelu(norm(x) @ W1' + b)                  [COLUMNS, ROWS] tiles
    shrink      partials[s] = h[:, s] @ W2[:, s]'            [COLUMNS, ROWS] tiles of a slice s
    join        x += sum(partials) + b, n = norm(x)          rows

Every phase loads its weights, waits for the grid (grid_barrier.py), loads what others wrote, past
L1, and multiplies once, without a loop over channels: between two barriers there is one trip to L2.
Products of few rows are transposed, ``W @ x'``: 64 or 128 output channels are the rows that
Hopper's tensor cores need, and 16 or 32 rows of x their columns, so that more programs than rows
allow share the work and each of them waits for few bytes.

A phase with fewer pieces than programs leaves the others idle, whose weights of the next phase can
come early: it begins at program ``FIRST``, behind the last one that is busy in the phase before.

Phases are called, not inlined: inlined into the loop over blocks, what is the same for the next
block (addresses, descriptors of shared memory) is kept in registers across it, and 0.8 to 1.8 KB a
thread are spilled.

LayerNorm in front of fc1 stands behind its product (ops/linear/one_shot.py); its statistics come
from ``project``, one mean and one sum of squared deviations for each part of COLUMNS channels.

Channels are held as two powers of two, KA + KB (384 = 256 + 128; KB may be 0).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastswin._triton.grid_barrier import wait
from fastswin._triton.math import gelu
from fastswin.ops.attention_half.tile import attend, normalize_parts, store_parts


@triton.jit
def typed(address, DTYPE: tl.constexpr):
    """A 16-byte aligned address as a pointer."""
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _own(FIRST: tl.constexpr):
    """This program's piece of work where program ``FIRST % programs`` has piece 0."""
    programs = tl.num_programs(0)
    return (tl.program_id(0) + programs - FIRST % programs) % programs


@triton.jit
def _strip(
    weight_ptr, first, start, active,
    ROWS: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """Output channels ``first ..`` of a weight ``[outputs, K]``, its channels ``start ..``."""
    at = (first + tl.arange(0, ROWS))[:, None] * K + start
    a = tl.load(weight_ptr + at + tl.arange(0, KA)[None, :], mask=active, other=0.0)
    b = a
    if KB > 0:
        b = tl.load(weight_ptr + at + (KA + tl.arange(0, KB))[None, :], mask=active, other=0.0)
    return a, b


@triton.jit
def _rows(x_ptr, row, live, start, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr):
    """Rows of a matrix ``[M, K]`` that other programs wrote, its channels ``start ..``."""
    at = row[:, None] * K + start
    a = tl.load(
        x_ptr + at + tl.arange(0, KA)[None, :], mask=live[:, None], other=0.0,
        cache_modifier=".cg",
    )  # fmt: skip
    b = a
    if KB > 0:
        b = tl.load(
            x_ptr + at + (KA + tl.arange(0, KB))[None, :], mask=live[:, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
    return a, b


@triton.jit
def _multiply(xa, xb, wa, wb, KB: tl.constexpr):
    """``x @ w'`` over both parts, fp32."""
    y = tl.dot(xa, tl.trans(wa))
    if KB > 0:
        y = tl.dot(xb, tl.trans(wb), y)
    return y


@triton.jit
def window_tokens(
    window, shifted, H: tl.constexpr, W: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Row of each token of a window in ``[B * H * W]``, which are real, the kind of its table.

    ``shifted`` is 0 or 1; the map is a whole number of windows.
    """
    per_row: tl.constexpr = W // WW
    per_col: tl.constexpr = H // WH
    window_row = window // per_row % per_col
    window_col = window % per_row
    token = tl.arange(0, NP)
    y = (window_row * WH + token // WW + shifted * SH) % H
    x = (window_col * WW + token % WW + shifted * SW) % W
    last_row = (window_row == per_col - 1).to(tl.int32)
    last_col = (window_col == per_row - 1).to(tl.int32)
    row = window // (per_row * per_col) * (H * W) + y * W + x
    return row, token < WH * WW, shifted * (2 * last_row + last_col)


@triton.jit(noinline=True)
def attend_phase(
    n_ptr, out_ptr, qkv_ptr, qkv_bias_ptr, table_ptr, shifted, counter_ptr, goal, scale,
    WINDOWS: tl.constexpr, NH: tl.constexpr, C: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr,
    SW: tl.constexpr, NP: tl.constexpr, SYNC: tl.constexpr,
):  # fmt: skip
    """Heads fastest: programs of a window, who read the same rows, start together."""
    D: tl.constexpr = C // NH
    DTYPE: tl.constexpr = n_ptr.dtype.element_ty
    item = tl.program_id(0)
    active = item < WINDOWS * NH
    first = item % NH * D
    wqa, wqb = _strip(qkv_ptr, first, 0, active, D, C, KA, KB)
    wka, wkb = _strip(qkv_ptr, C + first, 0, active, D, C, KA, KB)
    wva, wvb = _strip(qkv_ptr, 2 * C + first, 0, active, D, C, KA, KB)
    row, live, kind = window_tokens(item // NH, shifted, H, W, WH, WW, SH, SW, NP)
    d = first + tl.arange(0, D)
    q_bias = tl.load(qkv_bias_ptr + d, mask=active, other=0.0)
    k_bias = tl.load(qkv_bias_ptr + C + d, mask=active, other=0.0)
    v_bias = tl.load(qkv_bias_ptr + 2 * C + d, mask=active, other=0.0)
    token = tl.arange(0, NP)
    table_ptr += (kind * NH + item % NH) * (NP * NP)
    at = token[:, None] * NP + token[None, :]
    table = tl.load(table_ptr + at, mask=active, other=0.0)
    wait(counter_ptr, goal, SYNC)
    if active:
        xa, xb = _rows(n_ptr, row, live, 0, C, KA, KB)
        q = (_multiply(xa, xb, wqa, wqb, KB) + q_bias[None, :]).to(DTYPE)
        k = (_multiply(xa, xb, wka, wkb, KB) + k_bias[None, :]).to(DTYPE)
        v = (_multiply(xa, xb, wva, wvb, KB) + v_bias[None, :]).to(DTYPE)
        o = attend(q, k, v, table, scale, False)
        tl.store(out_ptr + row[:, None] * C + d[None, :], o.to(DTYPE), mask=live[:, None])


@triton.jit
def _tile(item, M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Output channels ``[COLUMNS]``, rows ``[ROWS]`` and which exist; channels fastest."""
    tiles_n: tl.constexpr = N // COLUMNS
    row = item // tiles_n * ROWS + tl.arange(0, ROWS)
    return item % tiles_n * COLUMNS + tl.arange(0, COLUMNS), row, row < M


@triton.jit(noinline=True)
def project_phase(
    o_ptr, x_ptr, stats_ptr, weight_ptr, bias_ptr, counter_ptr, goal,
    M: tl.constexpr, C: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr, SYNC: tl.constexpr,
):  # fmt: skip
    """x's own tile was joined two barriers ago and may be read before this one."""
    tiles_n: tl.constexpr = C // COLUMNS
    item = _own(FIRST)
    active = item < (M + ROWS - 1) // ROWS * tiles_n
    wa, wb = _strip(weight_ptr, item % tiles_n * COLUMNS, 0, active, COLUMNS, C, KA, KB)
    col, row, live = _tile(item, M, C, ROWS, COLUMNS)
    at = row[None, :] * C + col[:, None]
    valid = live[None, :] & active
    bias = tl.load(bias_ptr + col, mask=active, other=0.0)
    residual = tl.load(x_ptr + at, mask=valid, other=0.0, cache_modifier=".cg")
    wait(counter_ptr, goal, SYNC)
    if active:
        xa, xb = _rows(o_ptr, row, live, 0, C, KA, KB)
        y = _multiply(wa, wb, xa, xb, KB) + bias[:, None] + residual.to(tl.float32)
        stored = y.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + at, stored, mask=valid)
        y = stored.to(tl.float32)
        mean = tl.sum(y, 0) / COLUMNS
        y -= mean[None, :]
        to = stats_ptr + item % tiles_n * M + row
        tl.store(to, mean, mask=live)
        tl.store(to + tiles_n * M, tl.sum(y * y, 0), mask=live)


@triton.jit
def _statistics(stats_ptr, row, live, eps, M: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr):
    """Mean and 1 / deviation of rows from those of their parts.

    Means are added around the first part's, so that a large mean does not cancel.
    """
    at = stats_ptr + row
    pivot = tl.load(at, mask=live, other=0.0, cache_modifier=".cg")
    squares = tl.load(at + PARTS * M, mask=live, other=0.0, cache_modifier=".cg")
    shift = tl.zeros_like(pivot)
    between = tl.zeros_like(pivot)
    for part in tl.static_range(1, PARTS):
        d = tl.load(at + part * M, mask=live, other=0.0, cache_modifier=".cg") - pivot
        shift += d
        between += d * d
        squares += tl.load(
            at + (PARTS + part) * M, mask=live, other=0.0, cache_modifier=".cg"
        )  # fmt: skip
    shift = shift / PARTS
    between = tl.maximum(between / PARTS - shift * shift, 0.0)
    return pivot + shift, 1.0 / tl.sqrt(squares / C + between + eps)


@triton.jit(noinline=True)
def expand_phase(
    x_ptr, stats_ptr, h_ptr, weight_ptr, bias_ptr, sums_ptr, counter_ptr, goal, eps,
    M: tl.constexpr, C: tl.constexpr, HIDDEN: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FIRST: tl.constexpr,
    SYNC: tl.constexpr,
):  # fmt: skip
    """``norm(x) @ W' = rstd * (x @ W' - mean * W.sum(1))``; the sums come with the weights."""
    tiles_n: tl.constexpr = HIDDEN // COLUMNS
    item = _own(FIRST)
    active = item < (M + ROWS - 1) // ROWS * tiles_n
    wa, wb = _strip(weight_ptr, item % tiles_n * COLUMNS, 0, active, COLUMNS, C, KA, KB)
    col, row, live = _tile(item, M, HIDDEN, ROWS, COLUMNS)
    bias = tl.load(bias_ptr + col, mask=active, other=0.0)
    sums = tl.load(sums_ptr + col, mask=active, other=0.0)
    wait(counter_ptr, goal, SYNC)
    if active:
        xa, xb = _rows(x_ptr, row, live, 0, C, KA, KB)
        mean, rstd = _statistics(stats_ptr, row, live, eps, M, C, PARTS)
        y = _multiply(wa, wb, xa, xb, KB)
        y = (y - mean[None, :] * sums[:, None]) * rstd[None, :] + bias[:, None]
        h = gelu(y).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row[None, :] * HIDDEN + col[:, None], h, mask=live[None, :])


@triton.jit(noinline=True)
def shrink_phase(
    h_ptr, partials_ptr, weight_ptr, counter_ptr, goal,
    M: tl.constexpr, C: tl.constexpr, HIDDEN: tl.constexpr, SLICES: tl.constexpr,
    KA: tl.constexpr, KB: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FIRST: tl.constexpr, SYNC: tl.constexpr,
):  # fmt: skip
    """Slices slowest. KA + KB are a slice's channels."""
    tiles: tl.constexpr = (M + ROWS - 1) // ROWS * (C // COLUMNS)
    program = tl.program_id(0)
    active = program < SLICES * tiles
    part = program // tiles
    item = program % tiles
    start = part * (KA + KB)
    first = item % (C // COLUMNS) * COLUMNS
    wa, wb = _strip(weight_ptr, first, start, active, COLUMNS, HIDDEN, KA, KB)
    col, row, live = _tile(item, M, C, ROWS, COLUMNS)
    wait(counter_ptr, goal, SYNC)
    if active:
        ha, hb = _rows(h_ptr, row, live, start, HIDDEN, KA, KB)
        y = _multiply(wa, wb, ha, hb, KB)
        at = (part * M + row)[None, :] * C + col[:, None]
        tl.store(partials_ptr + at, y, mask=live[None, :])


@triton.jit
def _joined(
    x_ptr, partials_ptr, bias, at, mask, M: tl.constexpr, C: tl.constexpr, SLICES: tl.constexpr
):
    """Part of the stream's rows with the slices' sums, in their order; without slices as it is."""
    x = tl.load(x_ptr + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    if SLICES > 0:
        y = tl.load(partials_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
        for part in tl.static_range(1, SLICES):
            y += tl.load(
                partials_ptr + part * (M * C) + at, mask=mask, other=0.0, cache_modifier=".cg"
            )  # fmt: skip
        x += y + bias[None, :]
    return x


@triton.jit(noinline=True)
def norm_phase(
    x_ptr, n_ptr, partials_ptr, bias_ptr, counter_ptr, goal, eps,
    M: tl.constexpr, WIDTH: tl.constexpr, THREE: tl.constexpr, SLICES: tl.constexpr,
    ROWS: tl.constexpr, SYNC: tl.constexpr,
):  # fmt: skip
    """Join SLICES slices, if any, onto the stream, and leave its LayerNorm for the next block.

    Rows are one part of WIDTH channels or three, whose sums are added before threads exchange any.
    """
    PARTS: tl.constexpr = 3 if THREE else 1
    C: tl.constexpr = PARTS * WIDTH
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    live = row < M
    col = tl.arange(0, WIDTH)
    bias_a = col.to(tl.float32)
    if SLICES > 0:
        bias_a = tl.load(bias_ptr + col)
    bias_b = bias_a
    bias_c = bias_a
    if SLICES > 0 and THREE:
        bias_b = tl.load(bias_ptr + WIDTH + col)
        bias_c = tl.load(bias_ptr + 2 * WIDTH + col)
    if SLICES > 0:
        wait(counter_ptr, goal, SYNC)
    if first < M:
        at = row[:, None] * C + col[None, :]
        mask = live[:, None]
        a = _joined(x_ptr, partials_ptr, bias_a, at, mask, M, C, SLICES)
        b = a
        c = a
        if THREE:
            b = _joined(x_ptr, partials_ptr, bias_b, at + WIDTH, mask, M, C, SLICES)
            c = _joined(x_ptr, partials_ptr, bias_c, at + 2 * WIDTH, mask, M, C, SLICES)
        if SLICES > 0:
            store_parts(x_ptr, row * C, live, a, b, c, WIDTH, PARTS)
        a, b, c = normalize_parts(a, b, c, eps, WIDTH, PARTS)
        store_parts(n_ptr, row * C, live, a, b, c, WIDTH, PARTS)
