"""Relative position bias as the forward kernel of long windows reads its compact table.

A bias depends on the distance of query (qy, qx) and key (ky, kx), so rows of keys need no entries
of their own (packing.py):

    table [nH, 2 Wh - 1, Ww * Ww]      table[h, qy - ky + Wh - 1, qx * Ww + kx] = bias * log2(e)

and the place of a pair is a number of the query plus one of the key:

    query_place = (qy + Wh - 1) * Ww * Ww + qx * Ww        key_place = kx - ky * Ww * Ww

Along keys it is contiguous in runs of ``Ww``; where 8 divides that, vectors of 8 keys stay whole.
A window of 24 tokens a side has 27,072 entries a head, dense 331,776 and four times that where it
is shifted: the shift mask has no table here, it is computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastswin.ops.window_attention.geometry import SHIFT_MASK_FILL
from fastswin.ops.window_attention.packing import LOG2_E, SHORT_MIDDLE_BITS

#: What a pair of tokens of different regions gets, in log2 units.
MASK_FILL = tl.constexpr(SHIFT_MASK_FILL * LOG2_E)

#: Where 16-bit entries count from.
MIDDLE_BITS = tl.constexpr(SHORT_MIDDLE_BITS)


@triton.jit
def query_places(query, WH: tl.constexpr, WW: tl.constexpr):
    """What each query adds to the place of its pairs in a head's table."""
    return (query // WW + WH - 1) * (WW * WW) + query % WW * WW


@triton.jit
def key_places(key, WW: tl.constexpr):
    """What each key adds to it."""
    return key % WW - key // WW * (WW * WW)


@triton.jit
def regions(
    token, kind, WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr
):  # fmt: skip
    """Number of each token's region in a window of a kind (geometry.py)."""
    below = tl.where(token >= (WH - SH) * WW, kind // 2 * 2, 0)
    right = tl.where(token % WW >= WW - SW, kind % 2, 0)
    return below + right


@triton.jit
def table_span(first_query, BLOCK_Q: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr):
    """First entry that a tile of queries reads of its head's table, and entries from there on."""
    first_row = first_query // WW
    last_row = (tl.minimum(first_query + BLOCK_Q, WH * WW) - 1) // WW
    return first_row * (WW * WW), (last_row - first_row + WH) * (WW * WW)


@triton.jit
def widen(entry):
    """Entries as floats: fp32 ones as they are, 16-bit ones by the bits of a number in [8, 32)."""
    if entry.dtype == tl.int16:
        bits = entry.to(tl.int32) * 256 + MIDDLE_BITS
        entry = bits.to(tl.float32, bitcast=True)
    return entry


@triton.jit
def add_compact_bias(
    s, bias_ptr, query, key, kind, N: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
):  # fmt: skip
    """Scores ``s [BLOCK_Q, BLOCK_K]`` in log2 units with bias and shift mask; -inf where no key is.

    ``bias_ptr`` leads to the head's table; rows of queries that do not exist hold any numbers.
    """
    place = query_places(query, WH, WW)[:, None] + key_places(key, WW)[None, :]
    if N % BLOCK_Q == 0 and N % BLOCK_K == 0:
        s += widen(tl.load(bias_ptr + place))
    else:
        inside = (query < N)[:, None] & (key < N)[None, :]
        s += widen(tl.load(bias_ptr + place, mask=inside, other=0))
    if SH + SW > 0:
        query_region = regions(query, kind, WH, WW, SH, SW)
        key_region = regions(key, kind, WH, WW, SH, SW)
        s = tl.where(query_region[:, None] != key_region[None, :], s + MASK_FILL, s)
    if N % BLOCK_K != 0:
        s = tl.where((key < N)[None, :], s, -float("inf"))
    return s
