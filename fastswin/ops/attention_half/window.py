"""The attention half of one window on chip: what the kernels of whole halves and blocks share.

Rows of a window, ``[NP, C]`` as one or three column parts, go through norm, qkv, attention and proj
head by head; ``whole.py`` says why.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastswin.ops.attention_half.tile import (
    add_row,
    attend,
    load_parts,
    load_strip,
    multiply,
    normalize_parts,
)


@triton.jit
def load_outputs(ptr, desc, first, D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
                 TMA: tl.constexpr):  # fmt: skip
    """Outputs ``first .. first + D`` of a weight ``[outputs, C]`` as parts ``[D, WIDTH]``."""
    if TMA:
        a = desc.load([first, 0])
        b = a
        c = a
        if PARTS == 3:
            b = desc.load([first, WIDTH])
            c = desc.load([first, 2 * WIDTH])
    else:
        a, b, c = load_strip(ptr, first, D, WIDTH, PARTS)
    return a, b, c


@triton.jit
def load_inputs(ptr, desc, first, STRIDE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
                PARTS: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Inputs ``first .. first + D`` of a weight ``[C, STRIDE]`` as parts of its outputs."""
    if TMA:
        a = desc.load([0, first])
        b = a
        c = a
        if PARTS == 3:
            b = desc.load([WIDTH, first])
            c = desc.load([2 * WIDTH, first])
    else:
        row = tl.arange(0, WIDTH) * STRIDE
        ptr += row[:, None] + (first + tl.arange(0, D))[None, :]
        a = tl.load(ptr)
        b = a
        c = a
        if PARTS == 3:
            b = tl.load(ptr + WIDTH * STRIDE)
            c = tl.load(ptr + 2 * WIDTH * STRIDE)
    return a, b, c


@triton.jit
def _finish(y, bias_ptr, pad_ptr, at, padded, DTYPE: tl.constexpr, HAS_BIAS: tl.constexpr,
            HAS_PAD: tl.constexpr):  # fmt: skip
    """Bias behind a product, and the qkv of padded tokens."""
    if HAS_BIAS:
        y += tl.load(bias_ptr + at).to(tl.float32)[None, :]
    if HAS_PAD:
        y = tl.where(padded[:, None], tl.load(pad_ptr + at).to(tl.float32)[None, :], y)
    return y.to(DTYPE)


@triton.jit
def attention_sums(
    x_ptr, at, live, padded, pair, qkv_ptr, qkv_desc, qkv_bias_ptr, offset_ptr, bias_ptr,
    head_scale_ptr, pad_ptr, proj_ptr, proj_desc, proj_bias_ptr, scale, eps,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, NP: tl.constexpr,
    HAS_PAD: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_PROJ_BIAS: tl.constexpr, NORM_FIRST: tl.constexpr, POST_NORM: tl.constexpr,
    COSINE: tl.constexpr, TMA: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """``proj(attn(norm(x)))`` of a window in fp32, with the residual unless POST_NORM.

    ``x_ptr`` is where the window's image starts, ``bias_ptr`` where the table of its kind does.
    """
    C: tl.constexpr = WIDTH * PARTS
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    d = tl.arange(0, D)
    xa, xb, xc = load_parts(x_ptr, at, live, WIDTH, PARTS)
    # proj's bias (and the residual, unless the branch is normalised) is where the sums start
    acc_a = tl.zeros([NP, WIDTH], tl.float32)
    acc_b = acc_a
    acc_c = acc_a
    if not POST_NORM:  # halves change their layout, so they are widened here once more
        acc_a = xa.to(tl.float32)
        acc_b = xb.to(tl.float32)
        acc_c = xc.to(tl.float32)
        if HAS_OFFSET:
            acc_a, acc_b, acc_c = add_row(acc_a, acc_b, acc_c, offset_ptr, WIDTH, PARTS)
    if HAS_PROJ_BIAS:
        acc_a, acc_b, acc_c = add_row(acc_a, acc_b, acc_c, proj_bias_ptr, WIDTH, PARTS)
    if NORM_FIRST:
        fa = xa.to(tl.float32)
        fb = xb.to(tl.float32)
        fc = xc.to(tl.float32)
        if HAS_OFFSET:
            fa, fb, fc = add_row(fa, fb, fc, offset_ptr, WIDTH, PARTS)
        fa, fb, fc = normalize_parts(fa, fb, fc, eps, WIDTH, PARTS)
        xa = fa.to(DTYPE)
        xb = fb.to(DTYPE)
        xc = fc.to(DTYPE)
    for head in tl.range(0, NH, num_stages=NUM_STAGES):
        row = head * D
        # weights of a head are asked for together: their latency shows twice, not six times
        qa, qb, qc = load_outputs(qkv_ptr, qkv_desc, row, D, WIDTH, PARTS, TMA)
        ka, kb, kc = load_outputs(qkv_ptr, qkv_desc, C + row, D, WIDTH, PARTS, TMA)
        va, vb, vc = load_outputs(qkv_ptr, qkv_desc, 2 * C + row, D, WIDTH, PARTS, TMA)
        q = multiply(xa, xb, xc, qa, qb, qc, PARTS)
        q_h = _finish(q, qkv_bias_ptr, pad_ptr, row + d, padded, DTYPE, HAS_BIAS, HAS_PAD)
        k = multiply(xa, xb, xc, ka, kb, kc, PARTS)
        k_h = _finish(k, qkv_bias_ptr, pad_ptr, C + row + d, padded, DTYPE, HAS_BIAS, HAS_PAD)
        pa, pb, pc = load_inputs(proj_ptr, proj_desc, row, C, D, WIDTH, PARTS, TMA)
        bias = tl.load(bias_ptr + head * (NP * NP) + pair)
        v = multiply(xa, xb, xc, va, vb, vc, PARTS)
        v_h = _finish(v, qkv_bias_ptr, pad_ptr, 2 * C + row + d, padded, DTYPE, HAS_BIAS, HAS_PAD)
        head_scale = scale
        if COSINE:
            head_scale = tl.load(head_scale_ptr + head)
        o = attend(q_h, k_h, v_h, bias, head_scale, COSINE).to(DTYPE)
        acc_a = tl.dot(o, tl.trans(pa), acc_a)
        if PARTS == 3:
            acc_b = tl.dot(o, tl.trans(pb), acc_b)
            acc_c = tl.dot(o, tl.trans(pc), acc_c)
    return acc_a, acc_b, acc_c


@triton.jit
def add_normed(
    xa, xb, xc, a, b, c, weight_ptr, bias_ptr, eps, WIDTH: tl.constexpr, PARTS: tl.constexpr
):
    """``x + norm(branch) * weight + bias`` of V2 in fp32; x as it is stored, the branch fp32."""
    a, b, c = normalize_parts(a, b, c, eps, WIDTH, PARTS)
    col = tl.arange(0, WIDTH)
    a = a * tl.load(weight_ptr + col).to(tl.float32)[None, :] + xa.to(tl.float32)
    if PARTS == 3:
        gain = tl.load(weight_ptr + WIDTH + col).to(tl.float32)
        b = b * gain[None, :] + xb.to(tl.float32)
        gain = tl.load(weight_ptr + 2 * WIDTH + col).to(tl.float32)
        c = c * gain[None, :] + xc.to(tl.float32)
    return add_row(a, b, c, bias_ptr, WIDTH, PARTS)
