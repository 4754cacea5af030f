"""Device functions that several kernels share: GELU, row normalisation, interpreter switch."""

from __future__ import annotations

import triton
import triton.language as tl

from fastswin._triton.available import interpreting

#: Inline PTX does not exist on the CPU interpreter; kernels take this as a constant.
HARDWARE_TANH = tl.constexpr(not interpreting())

#: Whether int8 results are saturated by a multiply-add instead of minimum and maximum.
ONE_FMA = tl.constexpr(True)


@triton.jit
def _fitted_tanh(x, square):
    """``2 Phi(x) - 1`` as ``tanh(p(x))``; ``square`` is ``x * x``."""
    u = tl.minimum(square, 50.0)
    return _tanh(x * (0.797481171 + u * (0.0370271522 - 0.000352069504 * u)))


@triton.jit
def _tanh(z):
    if HARDWARE_TANH:
        t = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        t = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * z))
    return t


@triton.jit
def gelu(x):
    """Erf GELU of fp32 values for a half-precision store: ``0.5 x (1 + tanh(p(x)))``.

    p(x) = x (0.797481171 + 0.0370271522 u - 0.000352069504 u**2), u = min(x**2, 50): within 2.8e-5
    of ``x * Phi(x)`` for |x| <= 6, a tenth of a half-precision rounding near 1 (the usual tanh
    formula: 4.7e-4). libdevice's erf doubles the time of a fused MLP (docs/performance.md).
    """
    t = _fitted_tanh(x, x * x)
    half = 0.5 * x
    return half + half * t


@triton.jit
def gelu_erf(x):
    """Erf GELU of fp32 values to fp32 rounding, as PyTorch computes it."""
    return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def nearest_tf32(x):
    """fp32 numbers whose upper 19 bits, all that tensor cores read in TF32, are the nearest.

    They cut the lower 13 bits off, which loses twice as much on average and always towards 0. A
    GPU's own NaN, 0x7fffffff, stays one.
    """
    bits = tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFFEFFF)
    return (bits + 0x1000).to(tl.float32, bitcast=True)


@triton.jit
def tf32_number(x):
    """The nearest TF32 number, lower 13 bits 0, whoever reads it; of fp32."""
    bits = nearest_tf32(x).to(tl.int32, bitcast=True) & -8192
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scaled_gelu(x, factor):
    """``gelu(x) * factor`` with one multiplication less, for results that are stored in steps."""
    t = _fitted_tanh(x, x * x)
    half = x * (0.5 * factor)
    return half + half * t


@triton.jit
def gelu_and_slope(x):
    """``gelu(x)``, bit for bit, and its derivative ``Phi(x) + x phi(x)``, phi the density."""
    square = x * x
    t = _fitted_tanh(x, square)
    half = 0.5 * x
    density = 0.3989422804014327 * tl.math.exp2(-0.7213475204444817 * square)
    return half + half * t, (0.5 + 0.5 * t) + x * density


@triton.jit
def normalize_rows(a, b, C: tl.constexpr, CB: tl.constexpr, eps):
    """LayerNorm without affine of rows held as two column parts ``[M, CA]`` and ``[M, CB]``.

    A width such as 96 or 192 is no power of two; two exact parts (64 + 32) waste nothing where one
    padded part wastes a quarter. ``b`` is ignored when ``CB == 0``. fp32 in and out, two passes
    over registers: the mean first, so that large offsets do not cancel.
    """
    a, b, rstd = centre_rows(a, b, C, CB, eps)
    a = a * rstd[:, None]
    if CB > 0:
        b = b * rstd[:, None]
    return a, b


@triton.jit
def row_moments(a, b, C: tl.constexpr, CB: tl.constexpr):
    """Mean and sum of squared deviations from it of rows in two parts, ``[M]`` each."""
    total = tl.sum(a, 1)
    if CB > 0:
        total += tl.sum(b, 1)
    mean = total / C
    a = a - mean[:, None]
    squares = tl.sum(a * a, 1)
    if CB > 0:
        b = b - mean[:, None]
        squares += tl.sum(b * b, 1)
    return mean, squares


@triton.jit
def centre_rows(a, b, C: tl.constexpr, CB: tl.constexpr, eps):
    """Rows without their mean, and one over their standard deviation ``[M]``."""
    total = tl.sum(a, 1)
    if CB > 0:
        total += tl.sum(b, 1)
    mean = total / C
    a = a - mean[:, None]
    square = tl.sum(a * a, 1)
    if CB > 0:
        b = b - mean[:, None]
        square += tl.sum(b * b, 1)
    return a, b, 1.0 / tl.sqrt(square / C + eps)


@triton.jit
def join_slices(
    slices_ptr, bias_ptr, at, size, col, mask, SLICES: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Sum of a product's slices (ops/split_k), ``size`` values apart, in their order, bias last."""
    y = tl.load(slices_ptr + at, mask=mask, other=0.0)
    for part in tl.static_range(1, SLICES):
        y += tl.load(slices_ptr + part * size + at, mask=mask, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + col, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def inverse_step(scale):
    """``1 / scale`` of fp32 steps as the reference rounds it; 1 where the scale is 0."""
    return tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale))


@triton.jit
def round_to_8_bits(x, FORMAT: tl.constexpr, MAY_BE_NAN: tl.constexpr = True):
    """Saturate and round fp32 numbers in steps: ``tl.int8`` (-127..127) or ``tl.float8e4nv``.

    int8: adding 1.5 * 2**23 leaves the integer, rounded half to even, in the low byte, exactly;
    NaN becomes 0. fp8: the hardware's conversion saturates and keeps NaN.
    """
    if FORMAT == tl.int8:
        if MAY_BE_NAN:
            x = tl.where(x == x, x, 0.0)
        x = tl.minimum(tl.maximum(x, -127.0), 127.0)
        return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    return x.to(FORMAT)


@triton.jit
def _saturated(x, factor, shift):
    """``x * factor + shift`` between 0 and 1 (NaN: 0), one instruction instead of three."""
    if HARDWARE_TANH:
        y = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, factor, shift], dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        y = x * factor + shift
        y = tl.where(y == y, tl.minimum(tl.maximum(y, 0.0), 1.0), 0.0)
    return y


@triton.jit
def _unit_to_int8(u, centre):
    """0 to 1 as -127 to 127 with ``centre`` = 1.5 * 2**23 - 127; the low byte holds the integer."""
    return (u * 254.0 + centre).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def scale_to_8_bits(x, factor, FORMAT: tl.constexpr):
    """:func:`round_to_8_bits` of ``x * factor``, finite; int8 in a third of the issue slots.

    Minimum and maximum issue at half rate. A multiply-add that saturates to [0, 1] replaces both,
    and another takes that to integers: within 1e-5 of a step, which moves what lies at a half.
    """
    if FORMAT == tl.int8 and ONE_FMA:
        q = _unit_to_int8(_saturated(x, factor * (1.0 / 254.0), 0.5), 12582785.0)
    else:
        q = round_to_8_bits(x * factor, FORMAT, False)
    return q


@triton.jit
def rows_to_8_bits(x, factor, FORMAT: tl.constexpr):
    """The same for ``x [M, N]`` with a factor a row, ``[M, 1]``; rows whose factor is NaN are 0."""
    if FORMAT == tl.int8 and ONE_FMA:
        centre = tl.where(factor == factor, 12582785.0, 12582912.0)
        q = _unit_to_int8(_saturated(x, factor * (1.0 / 254.0), 0.5), centre)
    else:
        q = round_to_8_bits(x * factor, FORMAT)
    return q


@triton.jit
def gelu_to_8_bits(x, inverse, FORMAT: tl.constexpr):
    """:func:`gelu` of finite numbers in steps of ``1 / inverse``."""
    if FORMAT == tl.int8 and ONE_FMA:
        u = _saturated(x * 0.02, x, 0.0)  # min(x**2, 50) / 50
        z = x * (0.797481171 + u * (1.85135761 - 0.88017376 * u))
        t = _tanh(z)
        half = x * (inverse * (0.5 / 254.0))
        q = _unit_to_int8(_saturated(half + half * t, 1.0, 0.5), 12582785.0)
    else:
        q = round_to_8_bits(scaled_gelu(x, inverse), FORMAT, False)
    return q


@triton.jit
def int8_to_half(x):
    """int8 numbers as fp16, exactly; four at a time, where the hardware converts one in as long.

    A byte moved by 128 under the high byte of 1024.0 is 1024 + 128 + x; 1152 less is x.
    """
    if HARDWARE_TANH:
        y = tl.inline_asm_elementwise(
            """{
            .reg .b32 moved, bias;
            xor.b32 moved, $2, 0x80808080;
            mov.b32 bias, 0x64806480;
            prmt.b32 $0, moved, 0x64646464, 0x4140;
            prmt.b32 $1, moved, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, bias;
            sub.f16x2 $1, $1, bias;
            }""",
            "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        y = x.to(tl.float16)
    return y
