"""The whole attention half of one window in one kernel: LN, qkv, attention, proj, residual.

    x, out [B, H, W, C]   qkv [3C, C]   proj [C, C]   bias [kinds, nH, NP, NP]

V1: out = (x + o) + proj(attn(norm(x + o)));  V2: out = x + norm(proj(attn(x))) * g + b

As three kernels the half moves 8 units of tokens * C * itemsize; here x is read and written once. A
program keeps its window's rows (49, padded to 64) normalised on chip and walks over the heads: q, k
and v of one head, its attention, and the head's part of proj added to an fp32 accumulator
``[NP, C]`` that starts as the residual. 8 C**2 + 4 N C FLOPs a token, 64/49 of which are padding;
each program streams ``4 C**2`` weights from L2, which pays for few channels. Windows partition the
tokens, so ``out`` may be ``x``. Rows are held as one or three column parts (96 = 3 * 32).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, on_device
from fastswin._triton.launch import on_grid
from fastswin._triton.pdl import pdl_options, prefetch_l2, wait_for_previous
from fastswin.ops.attention_half.config import (
    WholeWindowConfig,
    column_parts,
    default_whole_window_config,
    row_tile,
)
from fastswin.ops.attention_half.tile import (
    add_row,
    attend,
    load_parts,
    load_strip,
    locate_rows,
    multiply,
    normalize_parts,
    store_parts,
)
from fastswin.ops.window_attention.geometry import num_windows
from fastswin.ops.window_attention.launch import check_grid
from fastswin.ops.window_attention.packing import LOG2_E

Pair = tuple[int, int]


@triton.jit
def _strip(ptr, desc, first, D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
           TMA: tl.constexpr):  # fmt: skip
    """Outputs ``first .. first + D`` of the qkv weight as column parts ``[D, WIDTH]``."""
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
def _proj_strip(ptr, desc, first, D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
                TMA: tl.constexpr):  # fmt: skip
    """Inputs ``first .. first + D`` of proj's weight as parts of its outputs ``[WIDTH, D]``."""
    if TMA:
        a = desc.load([0, first])
        b = a
        c = a
        if PARTS == 3:
            b = desc.load([WIDTH, first])
            c = desc.load([2 * WIDTH, first])
    else:
        row = tl.arange(0, WIDTH) * (WIDTH * PARTS)
        ptr += row[:, None] + (first + tl.arange(0, D))[None, :]
        a = tl.load(ptr)
        b = a
        c = a
        if PARTS == 3:
            b = tl.load(ptr + WIDTH * WIDTH * PARTS)
            c = tl.load(ptr + 2 * WIDTH * WIDTH * PARTS)
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
def _whole_window_kernel(
    x_ptr, qkv_ptr, qkv_desc, qkv_bias_ptr, offset_ptr, bias_ptr, head_scale_ptr, pad_ptr,
    proj_ptr, proj_desc, proj_bias_ptr, norm_weight_ptr, norm_bias_ptr, out_ptr,
    scale, eps, H, W, windows_per_col, windows_per_row,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, NH: tl.constexpr, D: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    HAS_PAD: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_PROJ_BIAS: tl.constexpr, NORM_FIRST: tl.constexpr, POST_NORM: tl.constexpr,
    COSINE: tl.constexpr, TMA: tl.constexpr, NUM_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per window."""
    C: tl.constexpr = WIDTH * PARTS
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    token = tl.arange(0, NP)
    start, at, live, padded, kind = locate_rows(
        tl.program_id(0), token, H, W, windows_per_col, windows_per_row, C,
        N, WH, WW, SH, SW, HAS_PAD,
    )  # fmt: skip
    x_ptr += start
    out_ptr += start
    bias_ptr += kind * (NH * NP * NP)
    pair = token[:, None] * NP + token[None, :]
    d = tl.arange(0, D)
    prefetch_l2(qkv_ptr, 3 * C * C, 512, PDL)
    prefetch_l2(proj_ptr, C * C, 512, PDL)
    wait_for_previous(PDL)
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
        qa, qb, qc = _strip(qkv_ptr, qkv_desc, row, D, WIDTH, PARTS, TMA)
        ka, kb, kc = _strip(qkv_ptr, qkv_desc, C + row, D, WIDTH, PARTS, TMA)
        va, vb, vc = _strip(qkv_ptr, qkv_desc, 2 * C + row, D, WIDTH, PARTS, TMA)
        q = multiply(xa, xb, xc, qa, qb, qc, PARTS)
        q_h = _finish(q, qkv_bias_ptr, pad_ptr, row + d, padded, DTYPE, HAS_BIAS, HAS_PAD)
        k = multiply(xa, xb, xc, ka, kb, kc, PARTS)
        k_h = _finish(k, qkv_bias_ptr, pad_ptr, C + row + d, padded, DTYPE, HAS_BIAS, HAS_PAD)
        pa, pb, pc = _proj_strip(proj_ptr, proj_desc, row, D, WIDTH, PARTS, TMA)
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
    if POST_NORM:
        acc_a, acc_b, acc_c = normalize_parts(acc_a, acc_b, acc_c, eps, WIDTH, PARTS)
        xa, xb, xc = load_parts(x_ptr, at, live, WIDTH, PARTS)
        col = tl.arange(0, WIDTH)
        acc_a = acc_a * tl.load(norm_weight_ptr + col).to(tl.float32)[None, :] + xa.to(tl.float32)
        if PARTS == 3:
            gain = tl.load(norm_weight_ptr + WIDTH + col).to(tl.float32)
            acc_b = acc_b * gain[None, :] + xb.to(tl.float32)
            gain = tl.load(norm_weight_ptr + 2 * WIDTH + col).to(tl.float32)
            acc_c = acc_c * gain[None, :] + xc.to(tl.float32)
        acc_a, acc_b, acc_c = add_row(acc_a, acc_b, acc_c, norm_bias_ptr, WIDTH, PARTS)
    store_parts(out_ptr, at, live, acc_a, acc_b, acc_c, WIDTH, PARTS)


def whole_window_fwd(
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    offset: torch.Tensor | None,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    pad_qkv: torch.Tensor | None,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    scale: float,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    eps: float,
    norm_first: bool,
    out: torch.Tensor | None = None,
    config: WholeWindowConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Launch on a contiguous ``x [B, H, W, C]``; ``bias`` and ``head_scale`` are packed."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    B, H, W, C = x.shape
    if out is None:
        out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    capability = device_capability(x.device)
    if config is None:
        config = default_whole_window_config(C, capability)
    rows, cols = num_windows((H, W), window_size)
    padded = (rows * window_size[0], cols * window_size[1]) != (H, W)
    if padded and pad_qkv is None:
        pad_qkv = torch.zeros(3 * C, dtype=x.dtype, device=x.device)
    columns = column_parts(C)
    assert columns is not None  # attention_half_blocker was asked before
    width, parts = columns
    D = C // num_heads
    qkv_desc: Any = qkv_weight
    proj_desc: Any = proj_weight
    if config.tma:
        qkv_desc = TensorDescriptor.from_tensor(qkv_weight, [D, width])
        proj_desc = TensorDescriptor.from_tensor(proj_weight, [width, D])
    tokens = window_size[0] * window_size[1]
    programs = B * rows * cols
    check_grid(programs)
    options = {"maxnreg": config.max_registers} if config.max_registers else {}
    with on_device(x.device):
        on_grid(_whole_window_kernel, (programs,))(
            x, qkv_weight, qkv_desc, x if qkv_bias is None else qkv_bias,
            x if offset is None else offset, bias, bias if head_scale is None else head_scale,
            x if pad_qkv is None else pad_qkv, proj_weight, proj_desc,
            x if proj_bias is None else proj_bias, x if norm_weight is None else norm_weight,
            x if norm_bias is None else norm_bias, out, scale * LOG2_E, eps, H, W, rows, cols,
            WIDTH=width, PARTS=parts, NH=num_heads, D=D, N=tokens, NP=row_tile(tokens),
            WH=window_size[0], WW=window_size[1], SH=shift_size[0], SW=shift_size[1],
            HAS_PAD=padded, HAS_OFFSET=offset is not None, HAS_BIAS=qkv_bias is not None,
            HAS_PROJ_BIAS=proj_bias is not None, NORM_FIRST=norm_first,
            POST_NORM=norm_weight is not None, COSINE=head_scale is not None, TMA=config.tma,
            NUM_STAGES=config.num_stages, num_warps=config.num_warps, **options,
            **pdl_options(pdl, capability),
        )  # fmt: skip
    return out
