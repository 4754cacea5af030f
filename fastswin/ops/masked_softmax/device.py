"""Device functions that the forward and backward softmax kernels share: rows, masks, scores."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

MASK_NONE = tl.constexpr(0)
MASK_HIDE = tl.constexpr(1)
MASK_ADD = tl.constexpr(2)


@triton.jit
def row_offset(i_loop, i0, i1, i2, s_loop, s0, s1, s2, ALIGN: tl.constexpr):
    """Elements from the tensor's start to each row; strides come in units of ALIGN elements."""
    steps = i_loop.to(tl.int64) * s_loop + i0.to(tl.int64) * s0
    return (steps + i1.to(tl.int64) * s1 + i2.to(tl.int64) * s2) * ALIGN


@triton.jit
def visible_keys(
    lens_ptr, i0, i1, i2, q0, q1, q2, n0, n1, n2, N, row_ok,
    CAUSAL: tl.constexpr, HAS_LENS: tl.constexpr,
):  # fmt: skip
    """Keys that each row sees under causal and seq_lens: the row's live prefix."""
    query = (i0 * q0 + i1 * q1 + i2 * q2).to(tl.int32)
    live = tl.where(row_ok, N, 0)
    if CAUSAL:
        live = tl.minimum(live, query + 1)
    if HAS_LENS:
        length = tl.load(lens_ptr + i0 * n0 + i1 * n1 + i2 * n2, mask=row_ok, other=0)
        length = length.to(tl.int32)
        live = tl.where(query < length, tl.minimum(live, length), 0)
    return live


@triton.jit
def load_limit(live, N_ALIGN: tl.constexpr):
    """``live`` rounded up so that whole vectors are loaded; what is past ``live`` is dropped.

    Never past N, a multiple of N_ALIGN. Without it the diagonal would force one-element loads.
    """
    G: tl.constexpr = N_ALIGN if N_ALIGN < 8 else 8
    return (live + G - 1) // G * G


@triton.jit
def loaded_elements(row_ok, limit, col, N, PREFIX: tl.constexpr, RAGGED: tl.constexpr):
    """Mask ``[R, 1 or L]`` of a tile: rows that exist, keys below each row's limit or below N.

    Its shape differs from tile to tile, so each use has a name of its own: Triton takes a name
    that a loop assigns again for a value carried from turn to turn, which may not change shape.
    """
    keep = row_ok[:, None]
    if PREFIX:
        keep = keep & (col[None, :] < limit[:, None])
    elif RAGGED:
        keep = keep & (col < N)[None, :]
    return keep


@triton.jit
def score(x, added, scale, HAS_BIAS: tl.constexpr, MASK: tl.constexpr):
    """scale * x + bias + mask in fp32; a NaN under a bool mask stays hidden."""
    s = x.to(tl.float32) * scale
    if HAS_BIAS or MASK != MASK_NONE:
        s = s + added
    if MASK == MASK_HIDE:
        s = tl.where(added == -float("inf"), added, s)
    return s
