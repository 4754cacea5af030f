"""Device functions that several kernels share: GELU, row normalisation, interpreter switch."""

from __future__ import annotations

import triton
import triton.language as tl

from fastswin._triton.available import interpreting

#: Inline PTX does not exist on the CPU interpreter; kernels take this as a constant.
HARDWARE_TANH = tl.constexpr(not interpreting())


@triton.jit
def gelu(x):
    """Erf GELU of fp32 values for a half-precision store: ``0.5 x (1 + tanh(p(x)))``.

    p(x) = x (0.797481171 + 0.0370271522 u - 0.000352069504 u**2), u = min(x**2, 50): within 2.8e-5
    of ``x * Phi(x)`` for |x| <= 6, a tenth of a half-precision rounding near 1 (the usual tanh
    formula: 4.7e-4). libdevice's erf doubles the time of a fused MLP (docs/performance.md).
    """
    u = tl.minimum(x * x, 50.0)
    z = x * (0.797481171 + u * (0.0370271522 - 0.000352069504 * u))
    if HARDWARE_TANH:
        t = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        t = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * z))
    half = 0.5 * x
    return half + half * t


@triton.jit
def normalize_rows(a, b, C: tl.constexpr, CB: tl.constexpr, eps):
    """LayerNorm without affine of rows held as two column parts ``[M, CA]`` and ``[M, CB]``.

    A width such as 96 or 192 is no power of two; two exact parts (64 + 32) waste nothing where one
    padded part wastes a quarter. ``b`` is ignored when ``CB == 0``. fp32 in and out, two passes
    over registers: the mean first, so that large offsets do not cancel.
    """
    total = tl.sum(a, 1)
    if CB > 0:
        total += tl.sum(b, 1)
    mean = total / C
    a = a - mean[:, None]
    square = tl.sum(a * a, 1)
    if CB > 0:
        b = b - mean[:, None]
        square += tl.sum(b * b, 1)
    rstd = 1.0 / tl.sqrt(square / C + eps)
    a = a * rstd[:, None]
    if CB > 0:
        b = b * rstd[:, None]
    return a, b
