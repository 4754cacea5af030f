"""Bias, shift mask and temperature packed by one launch, for calls that cannot pack beforehand.

The same tables as packing.py's, which takes some thirty small PyTorch operations: nothing once per
weight load, but more than the attention itself on every call of a training step.

    packed[kind, h, q, k] = (bias[h, q, k] + mask[kind, q, k]) * log2(e)     q, k < N
                          = -inf                                             k >= N
                          = 0                                                q >= N > k
    head_scale[h]         = exp(min(logit_scale[h], ln 100)) * log2(e)
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


@triton.jit
def _pack_tables_kernel(
    bias_ptr, logit_scale_ptr, packed_ptr, head_scale_ptr, fill, log2_e, max_logit_scale,
    N: tl.constexpr, NP: tl.constexpr, NH: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
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
        value = tl.load(bias_ptr + (head * N + query) * N + key, mask=inside, other=0.0)
        value = value.to(tl.float32)
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
    """Dense ``bias [nH, N, N]`` and ``logit_scale`` (nH elements) as the kernels read them.

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
        HAS_SCALE=logit_scale is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    return packed, head_scale
