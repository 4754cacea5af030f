"""Rows of odd length in half precision, two at a time: forward and backward.

    x, y, g, dx   rows of N keys, N odd, contiguous; two rows are N words of two elements
    word w        elements 2 w and 2 w + 1 of the pair; word N // 2 ends one row, begins the next

A row of 49 fp16 values starts at an odd element every second time, so nothing wider than one
element can be loaded from it, and a warp spends 28 instructions on an element (counted in the
machine code for sm_90). Two rows are a whole number of words: half as many loads, stores and
addresses, 56 instead of 64 lanes for 49 keys, and with N a constant every address is one base plus
an immediate. Which row a word belongs to is known when compiling, for all chunks but one.

Bias and mask are read once per block of pairs and stay in registers along the loop axis; the
arithmetic is that of forward.py and backward.py.
"""

# ruff: noqa: RUF005 - Triton has no starred tuples

from __future__ import annotations

import triton
import triton.language as tl

from fastswin.ops.masked_softmax.device import LOG2_E, MASK_ADD, MASK_NONE, row_offset, score


@triton.jit
def _of_first(word, low, high, fill, HALF: tl.constexpr, MIXED: tl.constexpr):
    """A chunk's elements of the first row; ``fill`` where they are the second's."""
    if MIXED:
        low = tl.where(word <= HALF, low, fill)
        high = tl.where(word < HALF, high, fill)
    return low, high


@triton.jit
def _of_second(word, low, high, fill, HALF: tl.constexpr, MIXED: tl.constexpr):
    """A chunk's elements of the second row; ``fill`` where they are the first's."""
    if MIXED:
        low = tl.where(word > HALF, low, fill)
        high = tl.where(word >= HALF, high, fill)
    return low, high


@triton.jit
def _row_value(word, first, second, LO: tl.constexpr, HI: tl.constexpr, HALF: tl.constexpr):
    """Per element of words LO to HI - 1, its row's value: ``first [R]`` or ``second [R]``."""
    low = second[:, None]
    high = second[:, None]
    if LO <= HALF:
        low = tl.where(word <= HALF, first[:, None], second[:, None])
        high = tl.where(word < HALF, first[:, None], second[:, None])
    if HI <= HALF:
        low = first[:, None]
        high = first[:, None]
    return low, high


@triton.jit
def _row_starts(ptr, row, D1, D2, s0, s1, s2, ALIGN: tl.constexpr):
    """Pointers to the rows of a broadcast operand."""
    i2 = row % D2
    i1 = row // D2 % D1
    i0 = row // D2 // D1
    return ptr + row_offset(i0 * 0, i0, i1, i2, 0, s0, s1, s2, ALIGN)


@triton.jit
def _added(
    bias_a, bias_b, mask_a, mask_b, element, keep, bias_key, mask_key, N: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """bias + mask at elements ``[1, L]`` of each pair, fp32; -inf where a bool mask hides."""
    in_first = element < N
    key = tl.where(in_first, element, element - N).to(tl.int64)
    added = tl.zeros([1, 1], tl.float32)
    if HAS_BIAS:
        at = tl.where(in_first, bias_a[:, None], bias_b[:, None]) + key * bias_key
        added = tl.load(at, mask=keep, other=0.0).to(tl.float32)
    if MASK != MASK_NONE:
        at = tl.where(in_first, mask_a[:, None], mask_b[:, None]) + key * mask_key
        if MASK == MASK_ADD:
            added = added + tl.load(at, mask=keep, other=0.0).to(tl.float32)
        else:
            added = tl.where(tl.load(at, mask=keep, other=0) != 0, -float("inf"), added)
    return added


@triton.jit
def _own_words(ptr, first_word, pair, lane, N: tl.constexpr):
    """Pointers ``[R, L, 2]`` to word ``lane`` of each pair; pairs start at word ``first_word``."""
    word = pair[:, None] * N + lane
    return ptr + 2 * first_word + (2 * word)[:, :, None] + tl.arange(0, 2)[None, None, :]


@triton.jit
def _load_words(at, ok, lane, N: tl.constexpr, L: tl.constexpr, CHUNKS: tl.constexpr):
    """The words ``[R, L, 2]`` of each chunk of some pairs."""
    words = ()
    for c in tl.static_range(CHUNKS):
        keep = ok & (c * L + lane < N)
        words = words + (tl.load(at + 2 * c * L, mask=keep[:, :, None], other=0.0),)
    return words


@triton.jit
def _halves(words):
    """Low and high elements ``[R, L]`` of words ``[R, L, 2]`` in fp32."""
    low, high = tl.split(words)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def softmax_fwd_paired_kernel(
    x_ptr, out_ptr, bias_ptr, mask_ptr, scale, pairs, pair_blocks, D1, D2, loop, steps,
    x_step, out_step, bias0, bias1, bias2, mask0, mask1, mask2, bias_key, mask_key,
    N: tl.constexpr, BIAS_ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, CHUNKS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program per (block of R pairs, run of ``steps`` loop positions); steps in words.

    With AHEAD the next position's words are asked for before this one's arithmetic.
    """
    HALF: tl.constexpr = N // 2
    pid = tl.program_id(0)
    first = pid // pair_blocks * steps
    last = tl.minimum(first + steps, loop)
    block = pid % pair_blocks * R
    pair = tl.arange(0, R)
    pair_ok = (block + pair < pairs)[:, None]
    row = 2 * (block + pair)
    bias_a = _row_starts(bias_ptr, row, D1, D2, bias0, bias1, bias2, BIAS_ALIGN)
    bias_b = _row_starts(bias_ptr, row + 1, D1, D2, bias0, bias1, bias2, BIAS_ALIGN)
    mask_a = _row_starts(mask_ptr, row, D1, D2, mask0, mask1, mask2, MASK_ALIGN)
    mask_b = _row_starts(mask_ptr, row + 1, D1, D2, mask0, mask1, mask2, MASK_ALIGN)
    lane = tl.arange(0, L)[None, :]
    added_low = ()
    added_high = ()
    for c in tl.static_range(CHUNKS):
        at_word = c * L + lane
        seen = pair_ok & (at_word < N)
        added_low = added_low + (_added(
            bias_a, bias_b, mask_a, mask_b, 2 * at_word, seen, bias_key, mask_key,
            N, HAS_BIAS, MASK,
        ),)  # fmt: skip
        added_high = added_high + (_added(
            bias_a, bias_b, mask_a, mask_b, 2 * at_word + 1, seen, bias_key, mask_key,
            N, HAS_BIAS, MASK,
        ),)  # fmt: skip
    start = block.to(tl.int64) * N
    x_own = _own_words(x_ptr, start, pair, lane, N)
    out_own = _own_words(out_ptr, start, pair, lane, N)
    two = tl.full([], 2, tl.int64)
    if AHEAD:
        after = _load_words(x_own + first * (two * x_step), pair_ok, lane, N, L, CHUNKS)
    for step in range(first, last):
        out_at = out_own + step * (two * out_step)
        if AHEAD:
            words = after
            more = pair_ok & (step + 1 < last)
            after = _load_words(x_own + (step + 1) * (two * x_step), more, lane, N, L, CHUNKS)
        else:
            words = _load_words(x_own + step * (two * x_step), pair_ok, lane, N, L, CHUNKS)
        lows = ()
        highs = ()
        for c in tl.static_range(CHUNKS):
            low, high = tl.split(words[c])
            lows = lows + (low,)
            highs = highs + (high,)
        peak_a = tl.full([R, L], -float("inf"), tl.float32)
        peak_b = peak_a
        score_low = ()
        score_high = ()
        for c in tl.static_range(CHUNKS):
            word = c * L + lane
            low = score(lows[c], added_low[c], scale, HAS_BIAS, MASK)
            high = score(highs[c], added_high[c], scale, HAS_BIAS, MASK)
            if (c + 1) * L > N:
                low = tl.where(word < N, low, -float("inf"))
                high = tl.where(word < N, high, -float("inf"))
            if c * L <= HALF:
                a, b = _of_first(word, low, high, -float("inf"), HALF, (c + 1) * L > HALF)
                peak_a = tl.maximum(peak_a, tl.maximum(a, b))
            if (c + 1) * L > HALF:
                a, b = _of_second(word, low, high, -float("inf"), HALF, c * L <= HALF)
                peak_b = tl.maximum(peak_b, tl.maximum(a, b))
            score_low = score_low + (low,)
            score_high = score_high + (high,)
        top_a = tl.max(peak_a, 1)
        top_b = tl.max(peak_b, 1)
        top_a = tl.where(top_a == -float("inf"), 0.0, top_a)
        top_b = tl.where(top_b == -float("inf"), 0.0, top_b)
        total_a = tl.zeros([R, L], tl.float32)
        total_b = total_a
        prob_low = ()
        prob_high = ()
        for c in tl.static_range(CHUNKS):
            word = c * L + lane
            top_low, top_high = _row_value(word, top_a, top_b, c * L, (c + 1) * L, HALF)
            low = tl.exp2((score_low[c] - top_low) * LOG2_E)
            high = tl.exp2((score_high[c] - top_high) * LOG2_E)
            if c * L <= HALF:
                a, b = _of_first(word, low, high, 0.0, HALF, (c + 1) * L > HALF)
                total_a += a + b
            if (c + 1) * L > HALF:
                a, b = _of_second(word, low, high, 0.0, HALF, c * L <= HALF)
                total_b += a + b
            prob_low = prob_low + (low,)
            prob_high = prob_high + (high,)
        sum_a = tl.sum(total_a, 1)
        sum_b = tl.sum(total_b, 1)
        inverse_a = 1.0 / tl.where(sum_a == 0.0, 1.0, sum_a)
        inverse_b = 1.0 / tl.where(sum_b == 0.0, 1.0, sum_b)
        for c in tl.static_range(CHUNKS):
            word = c * L + lane
            by_low, by_high = _row_value(word, inverse_a, inverse_b, c * L, (c + 1) * L, HALF)
            dtype = out_ptr.dtype.element_ty
            low_half = (prob_low[c] * by_low).to(dtype)
            high_half = (prob_high[c] * by_high).to(dtype)
            keep = pair_ok & (word < N)
            tl.store(out_at + 2 * c * L, tl.join(low_half, high_half), mask=keep[:, :, None])


@triton.jit
def softmax_bwd_paired_kernel(
    y_ptr, g_ptr, dx_ptr, partial_ptr, scale, pairs, pair_blocks, loop, steps,
    y_step, g_step, dx_step,
    N: tl.constexpr, NEEDS_DX: tl.constexpr, NEEDS_SUM: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, CHUNKS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program per (block of R pairs, run of ``steps`` loop positions); steps in words.

    With AHEAD the next position's words are asked for before this one's arithmetic.
    """
    HALF: tl.constexpr = N // 2
    pid = tl.program_id(0)
    run = pid // pair_blocks
    first = run * steps
    last = tl.minimum(first + steps, loop)
    block = pid % pair_blocks * R
    pair = tl.arange(0, R)
    pair_ok = (block + pair < pairs)[:, None]
    lane = tl.arange(0, L)[None, :]
    start = block.to(tl.int64) * N
    y_own = _own_words(y_ptr, start, pair, lane, N)
    g_own = _own_words(g_ptr, start, pair, lane, N)
    dx_own = _own_words(dx_ptr, start, pair, lane, N)
    sums_low = ()
    sums_high = ()
    if NEEDS_SUM:
        for _c in tl.static_range(CHUNKS):
            sums_low = sums_low + (tl.zeros([R, L], tl.float32),)
            sums_high = sums_high + (tl.zeros([R, L], tl.float32),)
    two = tl.full([], 2, tl.int64)
    if AHEAD:
        y_after = _load_words(y_own + first * (two * y_step), pair_ok, lane, N, L, CHUNKS)
        g_after = _load_words(g_own + first * (two * g_step), pair_ok, lane, N, L, CHUNKS)
    for step in range(first, last):
        dx_at = dx_own + step * (two * dx_step)
        if AHEAD:
            ys = y_after
            gs = g_after
            more = pair_ok & (step + 1 < last)
            y_after = _load_words(y_own + (step + 1) * (two * y_step), more, lane, N, L, CHUNKS)
            g_after = _load_words(g_own + (step + 1) * (two * g_step), more, lane, N, L, CHUNKS)
        else:
            ys = _load_words(y_own + step * (two * y_step), pair_ok, lane, N, L, CHUNKS)
            gs = _load_words(g_own + step * (two * g_step), pair_ok, lane, N, L, CHUNKS)
        products_a = tl.zeros([R, L], tl.float32)
        products_b = products_a
        for c in tl.static_range(CHUNKS):
            word = c * L + lane
            y_low, y_high = _halves(ys[c])
            g_low, g_high = _halves(gs[c])
            low = y_low * g_low
            high = y_high * g_high
            if c * L <= HALF:
                a, b = _of_first(word, low, high, 0.0, HALF, (c + 1) * L > HALF)
                products_a += a + b
            if (c + 1) * L > HALF:
                a, b = _of_second(word, low, high, 0.0, HALF, c * L <= HALF)
                products_b += a + b
        dot_a = tl.sum(products_a, 1)
        dot_b = tl.sum(products_b, 1)
        new_low = ()
        new_high = ()
        for c in tl.static_range(CHUNKS):
            word = c * L + lane
            dot_low, dot_high = _row_value(word, dot_a, dot_b, c * L, (c + 1) * L, HALF)
            y_low, y_high = _halves(ys[c])
            g_low, g_high = _halves(gs[c])
            ds_low = y_low * (g_low - dot_low)
            ds_high = y_high * (g_high - dot_high)
            if NEEDS_SUM:
                new_low = new_low + (sums_low[c] + ds_low,)
                new_high = new_high + (sums_high[c] + ds_high,)
            if NEEDS_DX:
                dtype = dx_ptr.dtype.element_ty
                dx = tl.join((ds_low * scale).to(dtype), (ds_high * scale).to(dtype))
                keep = pair_ok & (word < N)
                tl.store(dx_at + 2 * c * L, dx, mask=keep[:, :, None])
        sums_low = new_low
        sums_high = new_high
    if NEEDS_SUM:
        partial_at = _own_words(partial_ptr, start + run.to(tl.int64) * pairs * N, pair, lane, N)
        for c in tl.static_range(CHUNKS):
            keep = pair_ok & (c * L + lane < N)
            sums = tl.join(sums_low[c], sums_high[c])
            tl.store(partial_at + 2 * c * L, sums, mask=keep[:, :, None])
