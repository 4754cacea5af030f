"""Device functions of every window-attention kernel: addresses, scores, gradients, dropout.

A window is reached by arithmetic alone (geometry.py): its rows lie at ``row * stride_row`` from the
start of their image, ``row`` in 32 bits, images in 64. A padded token has a negative row, which
also says where its gradient is kept (``padding_slots`` in launch.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastswin._triton.math import (
    int8_to_half,
    inverse_step,
    nearest_tf32,
    round_to_8_bits,
    scale_to_8_bits,
)

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def locate_window(
    window, windows_per_col, windows_per_row, SHIFTED: tl.constexpr, PARTITIONED: tl.constexpr
):
    """Image (64-bit), row and column of a window in its map, and its kind in the bias table.

    An "image" is a window when PARTITIONED: its rows are the window's tokens.
    """
    image = window
    window_row = 0
    window_col = 0
    kind = 0
    if not PARTITIONED:
        per_image = windows_per_col * windows_per_row
        image = window // per_image
        window_row = window % per_image // windows_per_row
        window_col = window % windows_per_row
        if SHIFTED:
            kind = (window_row == windows_per_col - 1).to(tl.int32) * 2
            kind += (window_col == windows_per_row - 1).to(tl.int32)
    return image.to(tl.int64), window_row, window_col, kind


@triton.jit
def token_rows(
    window_row, window_col, token, H, W,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr, HAS_PAD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Row of each token in its image's ``[H * W]`` list, ``-1 - slot`` where it is padding."""
    row = token
    if not PARTITIONED:
        y = window_row * WH + token // WW
        x = window_col * WW + token % WW
        padded_h = (H + WH - 1) // WH * WH
        padded_w = (W + WW - 1) // WW * WW
        if SH > 0:
            y = tl.where(y + SH >= padded_h, y + SH - padded_h, y + SH)
        if SW > 0:
            x = tl.where(x + SW >= padded_w, x + SW - padded_w, x + SW)
        row = y * W + x
        if HAS_PAD:
            right = padded_w - W
            slot = tl.where(y < H, y * right + x - W, H * right + (y - H) * padded_w + x)
            row = tl.where((y < H) & (x < W), row, -1 - slot)
    if WIDE:
        row = row.to(tl.int64)
    return row


@triton.jit
def walk_to(
    wanted, windows, token, H, W, windows_per_col, windows_per_row, N: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr, HAS_PAD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A step of a walk over windows: number, image, place and kind, rows, known and real tokens.

    Past the last window its rows are read again, but no token is ``known``; ``real`` ones are known
    and no padding.
    """
    window = tl.minimum(wanted, windows - 1)
    image, window_row, window_col, kind = locate_window(
        window, windows_per_col, windows_per_row, SH + SW > 0, PARTITIONED
    )
    row = token_rows(
        window_row, window_col, token, H, W, WH, WW, SH, SW, PARTITIONED, HAS_PAD, WIDE
    )
    known = (token < N) & (wanted < windows)
    real = known
    if HAS_PAD:
        real = known & (row >= 0)
    return window, image, window_row, window_col, kind, row, known, real


@triton.jit
def load_rows(
    ptr, pad_ptr, row, token, stride_row, N: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, HAS_PAD: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_N, BLOCK_D]`` rows of one head; padded tokens read ``pad_ptr`` (a qkv bias)."""
    d = tl.arange(0, BLOCK_D)
    valid = (token < N)[:, None]
    if D != BLOCK_D:
        valid = valid & (d < D)[None, :]
    if HAS_PAD:
        real = (row >= 0)[:, None]
        x = tl.load(ptr + row[:, None] * stride_row + d[None, :], mask=valid & real, other=0.0)
        pad = tl.load(pad_ptr + d, mask=d < D, other=0.0).to(x.dtype)
        return tl.where(valid & (row < 0)[:, None], pad[None, :], x)
    return tl.load(ptr + row[:, None] * stride_row + d[None, :], mask=valid, other=0.0)


@triton.jit
def load_live_rows(ptr, row, live, stride_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a tensor that holds no padding (output, upstream gradient); 0 where not ``live``."""
    d = tl.arange(0, BLOCK_D)
    valid = live[:, None]
    if D != BLOCK_D:
        valid = valid & (d < D)[None, :]
    return tl.load(ptr + row[:, None] * stride_row + d[None, :], mask=valid, other=0.0)


@triton.jit
def store_rows(ptr, x, row, live, stride_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store ``x [BLOCK_N, BLOCK_D]`` to one head's rows where ``live``."""
    d = tl.arange(0, BLOCK_D)
    valid = live[:, None]
    if D != BLOCK_D:
        valid = valid & (d < D)[None, :]
    tl.store(
        ptr + row[:, None] * stride_row + d[None, :], x.to(ptr.dtype.element_ty), mask=valid
    )  # fmt: skip


@triton.jit
def inverse_norm(x):
    """``1 / max(||row||, 1e-12)`` in fp32, as torch.nn.functional.normalize has it."""
    x = x.to(tl.float32)
    return 1.0 / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-12)


@triton.jit
def normalize_gradient(x, inverse, gradient):
    """Gradient through ``x / max(||x||, 1e-12)`` per row, and ``sum(normalised x * gradient)``.

        dx = inverse * (gradient - n * sum(n * gradient)),   n = x * inverse

    the second term only where the norm is not clamped.
    """
    n = x.to(tl.float32) * inverse[:, None]
    along = tl.sum(n * gradient, 1)
    free = tl.where(inverse < 1e12, along, 0.0)
    return inverse[:, None] * (gradient - n * free[:, None]), along


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """Numbers as tensor cores are to read them: rounded to nearest where they would cut fp32."""
    if x.dtype == tl.float32 and PRECISION == "tf32":
        x = nearest_tf32(x)
    return x


@triton.jit
def scaled_products(
    a, a_norm, b, b_norm, scale, COSINE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """``scale * a b^T`` of one tile in log2 units, fp32; of normalised rows where COSINE."""
    a = operand(a, PRECISION)
    b = operand(b, PRECISION)
    s = tl.dot(a, tl.trans(b), input_precision=PRECISION).to(tl.float32)
    if COSINE:  # norms are applied to fp32 products: q, k stay exact in half precision
        return s * (a_norm * scale)[:, None] * b_norm[None, :]
    return s * scale


@triton.jit
def scores(
    a, a_norm, b, b_norm, scale, bias_ptr, mask_ptr, offset, in_table,
    COSINE: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of one tile in log2 units, ``[BLOCK_A, BLOCK_B]`` fp32; queries x keys or transposed.

    ``offset`` leads to each pair in the packed bias (and mask), which hold -inf for padded keys.
    8-bit operands give products in their steps, int8 exactly; ``scale`` then holds the steps.
    """
    s = scaled_products(a, a_norm, b, b_norm, scale, COSINE, PRECISION)
    s += tl.load(bias_ptr + offset, mask=in_table, other=-float("inf")).to(tl.float32)
    if HAS_MASK:
        m = tl.load(mask_ptr + offset, mask=in_table, other=-float("inf"))
        s = tl.where(m == -float("inf"), m, s + m)  # a hidden NaN stays hidden
    return s


@triton.jit
def power_of_2(x, EXACT: tl.constexpr):
    """``2**x`` of differences to a row's maximum; -inf gives 0, NaN stays.

    The hardware's is off by 2 units in the last place, which is all that half precision needs. For
    fp32 products a series of ``2**f``, |f| <= 1/2, to 5e-9, then an exact shift of the exponent.
    """
    if EXACT:
        clamped = tl.where(x < -126.0, -126.0, x)
        whole = tl.floor(clamped + 0.5)
        t = (clamped - whole) * LN_2
        series = 1.0 + t * (1 / 7)
        series = 1.0 + t * (1 / 6) * series
        series = 1.0 + t * (1 / 5) * series
        series = 1.0 + t * (1 / 4) * series
        series = 1.0 + t * (1 / 3) * series
        series = t * (1.0 + t * (1 / 2) * series)
        power = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
        y = tl.where(x < -126.0, 0.0, power + power * series)
        y = tl.where(x != x, x, y)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def inverse_sum(total, EXACT: tl.constexpr):
    """``1 / total`` of a row's sum; 1 for a row without a visible key."""
    total = tl.where(total == 0.0, 1.0, total)
    if EXACT:
        inverse = tl.div_rn(1.0, total)
    else:
        inverse = 1.0 / total
    return inverse


@triton.jit
def store_row_stats(ptr, row_max, total, query, N: tl.constexpr, EXACT: tl.constexpr):
    """Maximum (log2 units) and 1 / sum of each row, side by side; 0 for a row without a key.

    Two numbers, since the logarithm of the sum, of size 8, would round each weight by 4e-7.
    """
    scale = tl.where(total == 0.0, 0.0, inverse_sum(total, EXACT))
    row_max = tl.where(row_max == -float("inf"), 0.0, row_max)  # -inf - -inf would be NaN
    tl.store(ptr + 2 * query, row_max, mask=query < N)
    tl.store(ptr + 2 * query + 1, scale, mask=query < N)


@triton.jit
def load_row_stats(ptr, at, valid):
    """What :func:`store_row_stats` wrote; numbers that make every weight 0 where not ``valid``."""
    row_max = tl.load(ptr + 2 * at, mask=valid, other=float("inf"))
    return row_max, tl.load(ptr + 2 * at + 1, mask=valid, other=0.0)


@triton.jit
def product_step(scale, qkv_scale_ptr, COSINE: tl.constexpr):
    """Factor on V1's products of 8-bit queries and keys; in V2 the norms cancel the steps."""
    if qkv_scale_ptr is not None and not COSINE:
        scale = scale * tl.load(qkv_scale_ptr) * tl.load(qkv_scale_ptr + 1)
    return scale


@triton.jit
def half_values(v, qkv_scale_ptr):
    """8-bit values as fp16 numbers in their steps, exactly; wide ones as they are."""
    if qkv_scale_ptr is not None:
        if v.dtype == tl.int8:
            v = int8_to_half(v)
        else:
            v = v.to(tl.float16)
    return v


@triton.jit
def output_steps(qkv_scale_ptr, output_scale_ptr):
    """The values' step, and one over an 8-bit output's; 1 where there is none."""
    value_step = 1.0
    inverse = 1.0
    if qkv_scale_ptr is not None:
        value_step = tl.load(qkv_scale_ptr + 2)
    if output_scale_ptr is not None:
        inverse = inverse_step(tl.load(output_scale_ptr))
    return value_step, inverse


@triton.jit
def finish_output(o, value_step, inverse, qkv_scale_ptr, output_scale_ptr, FORMAT: tl.constexpr):
    """Undo the values' step and, with an output step, round to 8 bits; wide: as it is."""
    if qkv_scale_ptr is not None:
        o = o * value_step
    if output_scale_ptr is not None:
        if qkv_scale_ptr is None:
            o = round_to_8_bits(o * inverse, FORMAT)
        else:  # 8-bit values and their steps are finite
            o = scale_to_8_bits(o, inverse, FORMAT)
    return o


@triton.jit
def dropout_weights(seed, window, head, query, key, threshold, factor):
    """0 where an attention weight is dropped, else ``factor``; ``query`` and ``key`` broadcast.

    Philox4x32-10 of (query, key, window, head), so any tile of any kernel draws the same numbers;
    dropout.py has the same in PyTorch.
    """
    pair = query * 65536 + key
    zero = pair * 0
    drawn, _, _, _ = tl.philox(seed, pair, zero + window, zero + head, zero)
    return tl.where((drawn >> 8).to(tl.int32) >= threshold, factor, 0.0)
