"""Bias, shift mask and temperature packed by one launch, and a bias table's gradient by another.

The same tables as packing.py's, which takes some thirty small PyTorch operations: nothing once per
weight load, but more than the attention itself on every call of a training step.

    packed[kind, h, q, k] = (bias[h, q, k] + mask[kind, q, k]) * log2(e)     q, k < N
                          = -inf                                             k >= N
                          = 0                                                q >= N > k
    head_scale[h]         = exp(min(logit_scale[h], ln 100)) * log2(e)

A bias table ``[(2 Wh - 1) * (2 Ww - 1), nH]`` is read in place of a dense bias at

    table row of (q, k) = (qy - ky + Wh - 1) * (2 Ww - 1) + qx - kx + Ww - 1

and its gradient sums the backward's partial sums over runs of windows and over the pairs of that
row at once: as operators of PyTorch that is a sum, two flips, two unfolds and copies. A dense
bias's gradient is the sum over runs without the padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.launch import launch
from fastswin._triton.tiles import cdiv
from fastswin.ops.window_attention.config import padded_tokens
from fastswin.ops.window_attention.geometry import SHIFT_MASK_FILL
from fastswin.ops.window_attention.packing import LOG2_E
from fastswin.ops.window_attention.reference import MAX_LOGIT_SCALE

Pair = tuple[int, int]

_BLOCK = 1024

#: Queries (pairs, of a dense bias) and runs of windows that a program adds at a time.
_BLOCK_Q, _BLOCK_G = 64, 16


@triton.jit
def _pack_tables_kernel(
    bias_ptr, logit_scale_ptr, packed_ptr, head_scale_ptr, fill, log2_e, max_logit_scale,
    N: tl.constexpr, NP: tl.constexpr, NH: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    HAS_BIAS: tl.constexpr, TABLE: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per (kind, head, block of pairs)."""
    pid = tl.program_id(0)
    blocks: tl.constexpr = (NP * NP + BLOCK - 1) // BLOCK
    table = pid // blocks
    head = table % NH
    kind = table // NH
    pair = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    query = pair // NP
    key = pair % NP
    inside = (query < N) & (key < N)
    value = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        at = (head * N + query) * N + key
        if TABLE:
            below_key = query // WW - key // WW + WH - 1
            at = (below_key * (2 * WW - 1) + query % WW - key % WW + WW - 1) * NH + head
        value = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if SH + SW > 0:
        below = (query // WW >= WH - SH) != (key // WW >= WH - SH)
        right = (query % WW >= WW - SW) != (key % WW >= WW - SW)
        apart = (below & (kind // 2 > 0)) | (right & (kind % 2 > 0))
        value = tl.where(apart, value + fill, value)
    value = tl.where(query < N, value * log2_e, 0.0)
    value = tl.where(key < N, value, -float("inf"))
    tl.store(packed_ptr + table * (NP * NP) + pair, value, mask=pair < NP * NP)
    if HAS_SCALE:  # noqa: SIM102 (the compiler decides the outer one, a program the inner one)
        if pid % blocks + kind == 0:
            logit_scale = tl.load(logit_scale_ptr + head).to(tl.float32)
            temperature = tl.exp(tl.minimum(logit_scale, max_logit_scale))
            tl.store(head_scale_ptr + head, temperature * log2_e)


def pack_tables(
    bias: torch.Tensor | None,
    logit_scale: torch.Tensor | None,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``bias`` and ``logit_scale`` (nH elements) as the kernels read them.

    Args:
        bias: dense ``[nH, N, N]``, a table ``[(2 Wh - 1) * (2 Ww - 1), nH]``, or None.
        logit_scale: nH elements or None.
        num_heads, window_size, shift_size: of the attention.
        device: of the result.

    Returns:
        fp32 ``[kinds, nH, NP, NP]``, and fp32 ``[nH]`` or None.
    """
    N = window_size[0] * window_size[1]
    NP = padded_tokens(N)
    kinds = 1 if shift_size == (0, 0) else 4
    packed = torch.empty(kinds, num_heads, NP, NP, dtype=torch.float32, device=device)
    head_scale = None
    if logit_scale is not None:
        head_scale = torch.empty(num_heads, dtype=torch.float32, device=device)
    launch(
        _pack_tables_kernel, kinds * num_heads * cdiv(NP * NP, _BLOCK),
        packed if bias is None else bias.contiguous(),
        packed if logit_scale is None else logit_scale.contiguous(), packed,
        packed if head_scale is None else head_scale, SHIFT_MASK_FILL, LOG2_E, MAX_LOGIT_SCALE,
        N=N, NP=NP, NH=num_heads, WH=window_size[0], WW=window_size[1],
        SH=shift_size[0], SW=shift_size[1], HAS_BIAS=bias is not None,
        TABLE=bias is not None and bias.ndim == 2,
        HAS_SCALE=logit_scale is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    return packed, head_scale


@triton.jit(do_not_specialize=["G"])
def _table_gradient_kernel(
    partial_ptr, out_ptr, G, run_stride, head_stride, query_stride,
    NH: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """One program per row of the table and head: its (query, key) pairs, one key to a query."""
    rows: tl.constexpr = (2 * WH - 1) * (2 * WW - 1)
    row = tl.program_id(0) % rows
    head = tl.program_id(0) // rows
    dy = row // (2 * WW - 1) - (WH - 1)
    dx = row % (2 * WW - 1) - (WW - 1)
    partial_ptr += head.to(tl.int64) * head_stride
    total = tl.zeros([BLOCK_Q, BLOCK_G], tl.float32)
    for start in tl.range(0, WH * WW, BLOCK_Q):
        query = start + tl.arange(0, BLOCK_Q)
        key_y = query // WW - dy
        key_x = query % WW - dx
        inside = (key_y >= 0) & (key_y < WH) & (key_x >= 0) & (key_x < WW) & (query < WH * WW)
        at = query * query_stride + key_y * WW + key_x
        for first in tl.range(0, G, BLOCK_G):
            run = first + tl.arange(0, BLOCK_G)
            keep = inside[:, None] & (run < G)[None, :]
            place = partial_ptr + at[:, None] + run[None, :].to(tl.int64) * run_stride
            total += tl.load(place, mask=keep, other=0.0)
    total = tl.sum(tl.sum(total, 1), 0)
    tl.store(out_ptr + row * NH + head, total.to(out_ptr.dtype.element_ty))


def table_gradient(partial: torch.Tensor, table: torch.Tensor, window_size: Pair) -> torch.Tensor:
    """Gradient of a bias table from the backward's partial sums, in one fixed order.

    Args:
        partial: fp32 ``[runs, nH, >= N, >= N]``, contiguous.
        table: ``[(2 Wh - 1) * (2 Ww - 1), nH]``, whose shape and dtype the result has.
        window_size: ``(Wh, Ww)``.
    """
    runs, heads = partial.shape[:2]
    out = torch.empty_like(table, memory_format=torch.contiguous_format)
    if runs == 0:
        return out.zero_()
    launch(
        _table_gradient_kernel, out.numel(), partial, out, runs, *partial.stride()[:3],
        NH=heads, WH=window_size[0], WW=window_size[1], BLOCK_Q=_BLOCK_Q, BLOCK_G=_BLOCK_G,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["G", "elements"])
def _dense_gradient_kernel(
    partial_ptr, out_ptr, G, elements, run_stride, head_stride, query_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """One program per block of (head, query, key)."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = place // (N * N)
    at = head * head_stride + place // N % N * query_stride + place % N
    total = tl.zeros([BLOCK_G, BLOCK], tl.float32)
    for first in tl.range(0, G, BLOCK_G):
        run = first + tl.arange(0, BLOCK_G)
        keep = (run < G)[:, None] & (place < elements)[None, :]
        source = partial_ptr + run[:, None].to(tl.int64) * run_stride + at[None, :]
        total += tl.load(source, mask=keep, other=0.0)
    tl.store(out_ptr + place, tl.sum(total, 0), mask=place < elements)


def dense_gradient(partial: torch.Tensor, tokens: int) -> torch.Tensor:
    """fp32 ``[nH, N, N]``, the sum of ``partial [runs, nH, >= N, >= N]`` in one fixed order."""
    runs, heads = partial.shape[:2]
    out = torch.empty(heads, tokens, tokens, dtype=torch.float32, device=partial.device)
    if runs == 0:
        return out.zero_()
    launch(
        _dense_gradient_kernel, cdiv(out.numel(), _BLOCK_Q), partial, out, runs, out.numel(),
        *partial.stride()[:3], N=tokens, BLOCK=_BLOCK_Q, BLOCK_G=_BLOCK_G, num_warps=4,
    )  # fmt: skip
    return out
