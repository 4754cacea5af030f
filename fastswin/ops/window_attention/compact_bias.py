"""Relative position bias as the forward kernel of long windows reads its compact table.

A bias depends on the distance of query (qy, qx) and key (ky, kx), so a query's row of keys is a
part of one longer row that all queries of its column share (packing.py):

    table [nH, Ww, (2 Wh - 1) * Ww]    table[h, qx, (ky - qy + Wh - 1) * Ww + kx] = bias * log2(e)

and the place of a pair is a number of the query plus the key's own, key = ky * Ww + kx:

    query_place = qx * (2 Wh - 1) * Ww + (Wh - 1 - qy) * Ww

Along keys it is contiguous from the first to the last; where 8 divides Ww, vectors of 8 keys are
aligned. With rows of ``qy - ky`` in front of qx keys would be contiguous in runs of ``Ww`` only.
A window of 24 tokens a side has 27,072 entries a head, dense 331,776 and four times that where it
is shifted: the shift mask has no table here, it is computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastswin._triton.available import interpreting
from fastswin.ops.window_attention.geometry import SHIFT_MASK_FILL
from fastswin.ops.window_attention.packing import LOG2_E, SHORT_FIRST_BITS

#: What a pair of tokens of different regions gets, in log2 units.
MASK_FILL = tl.constexpr(SHIFT_MASK_FILL * LOG2_E)

#: Where 16-bit entries count from.
FIRST_BITS = tl.constexpr(SHORT_FIRST_BITS)

#: Inline PTX does not exist on the CPU interpreter.
PTX = tl.constexpr(not interpreting())

#: Two entries of a register to two floats, an instruction each: bytes 0, entry, entry, 0x41.
WIDENING = tl.constexpr("prmt.b32 $0, $2, 0x4100, 0x5104; prmt.b32 $1, $2, 0x4100, 0x5324;")


@triton.jit
def query_places(query, WH: tl.constexpr, WW: tl.constexpr):
    """What each query adds to its keys' numbers, for the places of its pairs in a head's table."""
    return query % WW * ((2 * WH - 1) * WW) + (WH - 1 - query // WW) * WW


@triton.jit
def regions(
    token, kind, WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr
):  # fmt: skip
    """Number of each token's region in a window of a kind (geometry.py)."""
    below = tl.where(token >= (WH - SH) * WW, kind // 2 * 2, 0)
    right = tl.where(token % WW >= WW - SW, kind % 2, 0)
    return below + right


@triton.jit
def widen(entry):
    """Entries as floats: fp32 ones as they are, 16-bit ones are bits 8 to 23 of one in [8, 32)."""
    if entry.dtype == tl.int16:
        if PTX:
            entry = tl.inline_asm_elementwise(
                WIDENING, "=r,=r,r", [entry], dtype=tl.float32, is_pure=True, pack=2
            )
        else:
            bits = (entry.to(tl.int32) & 0xFFFF) * 256 + FIRST_BITS
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
    place = query_places(query, WH, WW)[:, None] + key[None, :]
    if N % BLOCK_Q == 0 and N % BLOCK_K == 0:
        s += widen(tl.load(bias_ptr + place))
    else:
        inside = (query < N)[:, None] & (key < N)[None, :]
        s += widen(tl.load(bias_ptr + place, mask=inside, other=0))
    if SH + SW > 0:  # noqa: SIM102 (the compiler decides the outer one, a program the inner one)
        if kind > 0:
            query_region = regions(query, kind, WH, WW, SH, SW)
            key_region = regions(key, kind, WH, WW, SH, SW)
            s = tl.where(query_region[:, None] != key_region[None, :], s + MASK_FILL, s)
    if N % BLOCK_K != 0:
        s = tl.where((key < N)[None, :], s, -float("inf"))
    return s
