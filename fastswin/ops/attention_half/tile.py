"""Device functions of both forms: rows of a window, projections, attention of one head."""

from __future__ import annotations

import triton
import triton.language as tl

from fastswin.ops.window_attention.tile import inverse_norm, locate_window, token_rows


@triton.jit
def locate_rows(
    window, token, H, W, windows_per_col, windows_per_row, C,
    N: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    HAS_PAD: tl.constexpr,
):  # fmt: skip
    """Of a window: where its image starts in x, where each token lies in it, which tokens are real,
    which are padding, and the kind of its bias table."""
    image, window_row, window_col, kind = locate_window(
        window, windows_per_col, windows_per_row, SH + SW > 0, False
    )
    row = token_rows(window_row, window_col, token, H, W, WH, WW, SH, SW, False, HAS_PAD, False)
    inside = token < N
    live = inside
    padded = token < 0
    if HAS_PAD:
        live = inside & (row >= 0)
        padded = inside & (row < 0)
    return image * H * W * C, row * C, live, padded, kind


@triton.jit
def load_parts(ptr, at, live, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """One or three column parts ``[rows, WIDTH]`` of rows that start at ``at``; 0 if not live."""
    col = tl.arange(0, WIDTH)
    a = tl.load(ptr + at[:, None] + col[None, :], mask=live[:, None], other=0.0)
    b = a
    c = a
    if PARTS == 3:
        b = tl.load(ptr + at[:, None] + (WIDTH + col)[None, :], mask=live[:, None], other=0.0)
        c = tl.load(ptr + at[:, None] + (2 * WIDTH + col)[None, :], mask=live[:, None], other=0.0)
    return a, b, c


@triton.jit
def store_parts(ptr, at, live, a, b, c, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Store one or three column parts where ``live``."""
    col = tl.arange(0, WIDTH)
    dtype: tl.constexpr = ptr.dtype.element_ty
    tl.store(ptr + at[:, None] + col[None, :], a.to(dtype), mask=live[:, None])
    if PARTS == 3:
        tl.store(ptr + at[:, None] + (WIDTH + col)[None, :], b.to(dtype), mask=live[:, None])
        tl.store(ptr + at[:, None] + (2 * WIDTH + col)[None, :], c.to(dtype), mask=live[:, None])


@triton.jit
def add_row(a, b, c, ptr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """A vector ``[C]`` added to every row, in fp32."""
    col = tl.arange(0, WIDTH)
    a = a.to(tl.float32) + tl.load(ptr + col).to(tl.float32)[None, :]
    if PARTS == 3:
        b = b.to(tl.float32) + tl.load(ptr + WIDTH + col).to(tl.float32)[None, :]
        c = c.to(tl.float32) + tl.load(ptr + 2 * WIDTH + col).to(tl.float32)[None, :]
    else:
        b = a
        c = a
    return a, b, c


@triton.jit
def normalize_parts(a, b, c, eps, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """LayerNorm without affine of fp32 rows, two passes over registers."""
    total = a
    if PARTS == 3:
        total = a + b + c
    mean = tl.sum(total, 1) / (PARTS * WIDTH)
    a = a - mean[:, None]
    square = a * a
    if PARTS == 3:
        b = b - mean[:, None]
        c = c - mean[:, None]
        square += b * b + c * c
    rstd = 1.0 / tl.sqrt(tl.sum(square, 1) / (PARTS * WIDTH) + eps)
    a = a * rstd[:, None]
    if PARTS == 3:
        b = b * rstd[:, None]
        c = c * rstd[:, None]
    else:
        b = a
        c = a
    return a, b, c


@triton.jit
def load_strip(ptr, first, ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Rows ``first .. first + ROWS`` of a weight ``[outputs, C]`` as column parts."""
    row = first + tl.arange(0, ROWS)
    return load_parts(ptr, row * (PARTS * WIDTH), row >= 0, WIDTH, PARTS)


@triton.jit
def multiply(a, b, c, wa, wb, wc, PARTS: tl.constexpr):
    """``x @ w.T`` over column parts, fp32."""
    y = tl.dot(a, tl.trans(wa))
    if PARTS == 3:
        y = tl.dot(b, tl.trans(wb), y)
        y = tl.dot(c, tl.trans(wc), y)
    return y


@triton.jit
def attend(q, k, v, bias, scale, COSINE: tl.constexpr):
    """Softmax attention of one head: ``q, k, v [NP, D]``, ``bias [NP, NP]`` (packing.py), fp32 out.

    No row is without a visible key: shift masks are finite and keys of the row's own window.
    """
    s = tl.dot(q, tl.trans(k))
    if COSINE:  # norms are applied to fp32 products: q, k stay exact in half precision
        s = s * inverse_norm(q)[:, None] * inverse_norm(k)[None, :]
    s = s * scale + bias.to(tl.float32)
    p = tl.exp2(s - tl.max(s, 1)[:, None])
    total = tl.sum(p, 1)
    return tl.dot(p.to(v.dtype), v) * (1.0 / total)[:, None]
