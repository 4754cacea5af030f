"""Bias, mask and temperature in the form that the kernel reads.

The kernel computes ``exp2`` instead of ``exp``, so everything added to or multiplied with the
scores carries a factor log2(e), applied once here. The packed bias is

    [kinds, nH, NP, NP]    kinds = 4 where shifted (bias + shift mask), else 1

padded from ``N`` to ``NP`` tokens: -inf in padded key columns, so the kernel needs no key mask,
and 0 in padded query rows, whose results are never stored. Cost: once per weight load; the table
of Swin-T's first stage is 4 x 3 x 64 x 64 x 2 bytes = 98 KB and stays in L2.

Long windows of inference have a compact table instead, without mask and padding, in which queries
of one column share their keys' entries at the same distance of rows (compact_bias.py):

    [nH, Ww, (2 Wh - 1) * Ww]   table[h, qx, (ky - qy + Wh - 1) * Ww + kx] = bias[h, q, k] * log2(e)

For a window of 24 x 24 tokens that is a 12th of the dense one. In half precision an entry is 16
bits of an fp32 number in [8, 32), whose bits are those of 8 plus 256 times the entry: softmax does
not see a constant, so each head's largest value is moved to the upper end. What is stored is off by
2**-12 at most, which changes a probability p by less than 2**-11.5 * p * (1 - p). fp16 below the
head's maximum would not do: V2's biases lie up to 23 below it in log2 units, where fp16 is off by
2**-7, and such a one may be the largest of its row.
"""

from __future__ import annotations

import math

import torch

from fastswin.ops.window_attention.config import padded_tokens
from fastswin.ops.window_attention.geometry import window_kind_mask
from fastswin.ops.window_attention.reference import MAX_LOGIT_SCALE

Pair = tuple[int, int]

LOG2_E = math.log2(math.e)

#: Bits of 8.0, from which 16-bit entries count.
SHORT_FIRST_BITS = 0x41000000

#: Where a head's largest value is moved to, and how far below it others may lie.
SHORT_TOP = 32.0 - 2.0**-10
SHORT_RANGE = SHORT_TOP - 8.0


def pack_bias(
    bias: torch.Tensor | None,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Dense bias ``[nH, N, N]`` (or None) to the kernel's ``[kinds, nH, NP, NP]`` table.

    Args:
        dtype: storage of the table. fp16 halves its traffic; callers check that it fits.
    """
    N = window_size[0] * window_size[1]
    NP = padded_tokens(N)
    dense = torch.zeros(num_heads, N, N, device=device) if bias is None else bias.float()
    if shift_size == (0, 0):
        dense = dense[None]
    else:
        dense = dense[None] + window_kind_mask(window_size, shift_size, device)[:, None]
    packed = torch.zeros(dense.shape[0], num_heads, NP, NP, device=device)
    packed[..., N:] = -math.inf
    packed[..., N:, :] = 0.0
    packed[..., :N, :N] = dense * LOG2_E
    return packed.to(dtype)


def pack_compact_bias(relative_bias: torch.Tensor, window_size: Pair) -> torch.Tensor:
    """Relative bias ``[(2 Wh - 1) * (2 Ww - 1), nH]`` to a compact table, fp32."""
    rows, cols = window_size
    heads = relative_bias.shape[1]
    table = relative_bias.float().view(2 * rows - 1, 2 * cols - 1, heads) * LOG2_E
    slid = table.unfold(1, cols, 1)  # [qy - ky + Wh - 1, qx, nH, Ww - 1 - kx]
    by_column = slid.permute(2, 1, 0, 3).flip(2, 3).contiguous()
    return by_column.view(heads, cols, (2 * rows - 1) * cols)


def shorten_compact_bias(table: torch.Tensor) -> torch.Tensor | None:
    """A compact table's entries in 16 bits, which int16 holds; None where a head spans too much."""
    below = table - table.amax((1, 2), keepdim=True)
    if not (below >= -SHORT_RANGE).all():  # also where there is a NaN
        return None
    bits = (below + SHORT_TOP).view(torch.int32)
    entries = (bits + 0x80 - SHORT_FIRST_BITS) >> 8  # 0 to 65,535
    return torch.where(entries < 1 << 15, entries, entries - (1 << 16)).to(torch.int16)


def pack_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Mask ``[nW, N, N]`` to fp32 ``[nW, NP, NP]``; bool and uint8 hide with -inf."""
    if mask is None:
        return None
    if mask.dtype.is_floating_point:
        values = mask.float() * LOG2_E
    else:
        values = torch.zeros(mask.shape, device=mask.device).masked_fill(mask != 0, -math.inf)
    windows, N, _ = mask.shape
    NP = padded_tokens(N)
    packed = torch.zeros(windows, NP, NP, device=mask.device)
    packed[:, :N, :N] = values
    return packed


def pack_head_scale(logit_scale: torch.Tensor | None) -> torch.Tensor | None:
    """V2's temperature per head, ``exp(min(logit_scale, ln 100)) * log2(e)``, fp32 ``[nH]``."""
    if logit_scale is None:
        return None
    return logit_scale.float().flatten().clamp(max=MAX_LOGIT_SCALE).exp() * LOG2_E
