"""A whole block of a window in one kernel: attention half, then MLP half, x read and written once.

    x, out [B, H, W, C]   qkv [3C, C]   proj [C, C]   fc1 [4C, C]   fc2 [C, 4C]

    V1   y = x + proj(attn(norm(x)));      out = y + fc2(gelu(fc1(norm(y))))
    V2   y = x + norm(proj(attn(x)));      out = y + norm(fc2(gelu(fc1(y))))

Attention knows its window only and the MLP its token only, so a block is a function of single
windows; shifting moves their borders between blocks, and a second block cannot follow. A program
takes one window: its rows go through ops/attention_half's walk over heads, are rounded to x's dtype
as if they had been stored, and walk over the hidden units, whose map exists as tiles
``[64, BLOCK_H]``. 24 C**2 + 4 N C FLOPs a token, 64/49 of which are padding; every program streams
``12 C**2`` weights from L2, which pays for few channels: five launches and 8 units of
tokens * C * itemsize become one and 2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, on_device
from fastswin._triton.launch import on_grid
from fastswin._triton.math import gelu
from fastswin._triton.pdl import launch_dependents, pdl_options, prefetch_l2, wait_for_previous
from fastswin.ops.attention_half.config import column_parts, row_tile
from fastswin.ops.attention_half.tile import (
    add_row,
    load_parts,
    locate_rows,
    multiply,
    normalize_parts,
    store_parts,
)
from fastswin.ops.attention_half.window import (
    add_normed,
    attention_sums,
    load_inputs,
    load_outputs,
)
from fastswin.ops.swin_block.config import SwinBlockConfig, default_swin_block_config
from fastswin.ops.window_attention.geometry import num_windows
from fastswin.ops.window_attention.launch import check_grid
from fastswin.ops.window_attention.packing import LOG2_E

Pair = tuple[int, int]


@triton.jit
def _feed_forward(
    na, nb, nc, acc_a, acc_b, acc_c, fc1_ptr, fc1_desc, fc1_bias_ptr, fc2_ptr, fc2_desc,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr,
    TMA: tl.constexpr, NUM_STAGES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """``acc + fc2(gelu(fc1(n)))`` of a window's rows, a tile of hidden units at a time."""
    for start in tl.range(0, HIDDEN, BLOCK_H, num_stages=NUM_STAGES):
        wa, wb, wc = load_outputs(fc1_ptr, fc1_desc, start, BLOCK_H, WIDTH, PARTS, TMA)
        va, vb, vc = load_inputs(fc2_ptr, fc2_desc, start, HIDDEN, BLOCK_H, WIDTH, PARTS, TMA)
        h = multiply(na, nb, nc, wa, wb, wc, PARTS)
        h += tl.load(fc1_bias_ptr + start + tl.arange(0, BLOCK_H)).to(tl.float32)[None, :]
        h = gelu(h).to(DTYPE)
        acc_a = tl.dot(h, tl.trans(va), acc_a)
        if PARTS == 3:
            acc_b = tl.dot(h, tl.trans(vb), acc_b)
            acc_c = tl.dot(h, tl.trans(vc), acc_c)
    return acc_a, acc_b, acc_c


@triton.jit
def _swin_block_kernel(
    x_ptr, qkv_ptr, qkv_desc, qkv_bias_ptr, bias_ptr, head_scale_ptr, pad_ptr, proj_ptr, proj_desc,
    proj_bias_ptr, fc1_ptr, fc1_desc, fc1_bias_ptr, fc2_ptr, fc2_desc, fc2_bias_ptr,
    norm1_weight_ptr, norm1_bias_ptr, norm2_weight_ptr, norm2_bias_ptr, out_ptr,
    scale, eps, H, W, windows_per_col, windows_per_row,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, NH: tl.constexpr, D: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    HAS_PAD: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_PROJ_BIAS: tl.constexpr,
    POST_NORM: tl.constexpr, COSINE: tl.constexpr, TMA: tl.constexpr, NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per window."""
    launch_dependents(PDL)
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
    prefetch_l2(qkv_ptr, 3 * C * C, 512, PDL)
    prefetch_l2(proj_ptr, C * C, 512, PDL)
    prefetch_l2(fc1_ptr, HIDDEN * C, 512, PDL)
    prefetch_l2(fc2_ptr, HIDDEN * C, 512, PDL)
    wait_for_previous(PDL)
    a, b, c = attention_sums(
        x_ptr, at, live, padded, pair, qkv_ptr, qkv_desc, qkv_bias_ptr, x_ptr, bias_ptr,
        head_scale_ptr, pad_ptr, proj_ptr, proj_desc, proj_bias_ptr, scale, eps,
        WIDTH, PARTS, NH, D, NP, HAS_PAD, False, HAS_BIAS, HAS_PROJ_BIAS, not POST_NORM,
        POST_NORM, COSINE, TMA, NUM_STAGES,
    )  # fmt: skip
    if POST_NORM:
        xa, xb, xc = load_parts(x_ptr, at, live, WIDTH, PARTS)
        a, b, c = add_normed(
            xa, xb, xc, a, b, c, norm1_weight_ptr, norm1_bias_ptr, eps, WIDTH, PARTS
        )
    ya = a.to(DTYPE)  # the residual stream is stored in this dtype, here as everywhere
    yb = b.to(DTYPE)
    yc = c.to(DTYPE)
    if POST_NORM:
        na = ya
        nb = yb
        nc = yc
        a = tl.zeros([NP, WIDTH], tl.float32)
        b = a
        c = a
    else:
        a = ya.to(tl.float32)
        b = yb.to(tl.float32)
        c = yc.to(tl.float32)
        na, nb, nc = normalize_parts(a, b, c, eps, WIDTH, PARTS)
        na = na.to(DTYPE)
        nb = nb.to(DTYPE)
        nc = nc.to(DTYPE)
    a, b, c = add_row(a, b, c, fc2_bias_ptr, WIDTH, PARTS)
    a, b, c = _feed_forward(
        na, nb, nc, a, b, c, fc1_ptr, fc1_desc, fc1_bias_ptr, fc2_ptr, fc2_desc,
        WIDTH, PARTS, HIDDEN, BLOCK_H, TMA, NUM_STAGES, DTYPE,
    )  # fmt: skip
    if POST_NORM:
        a, b, c = add_normed(
            ya, yb, yc, a, b, c, norm2_weight_ptr, norm2_bias_ptr, eps, WIDTH, PARTS
        )
    store_parts(out_ptr, at, live, a, b, c, WIDTH, PARTS)


def swin_block_fwd(
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    pad_qkv: torch.Tensor | None,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor | None,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor,
    norm1_weight: torch.Tensor | None,
    norm1_bias: torch.Tensor | None,
    norm2_weight: torch.Tensor | None,
    norm2_bias: torch.Tensor | None,
    scale: float,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    eps: float,
    out: torch.Tensor | None = None,
    config: SwinBlockConfig | None = None,
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
        config = default_swin_block_config(C, capability)
    rows, cols = num_windows((H, W), window_size)
    padded = (rows * window_size[0], cols * window_size[1]) != (H, W)
    if padded and pad_qkv is None:
        pad_qkv = torch.zeros(3 * C, dtype=x.dtype, device=x.device)
    columns = column_parts(C)
    assert columns is not None  # swin_block_blocker was asked before
    width, parts = columns
    D, hidden = C // num_heads, fc1_weight.shape[0]
    tiles: list[Any] = [qkv_weight, proj_weight, fc1_weight, fc2_weight]
    if config.tma:
        shapes = [D, width], [width, D], [config.block_h, width], [width, config.block_h]
        tiles = [TensorDescriptor.from_tensor(t, s) for t, s in zip(tiles, shapes, strict=True)]
    tokens = window_size[0] * window_size[1]
    programs = B * rows * cols
    check_grid(programs)
    options = {"maxnreg": config.max_registers} if config.max_registers else {}
    norms = (x if n is None else n for n in (norm1_weight, norm1_bias, norm2_weight, norm2_bias))
    with on_device(x.device):
        on_grid(_swin_block_kernel, (programs,))(
            x, qkv_weight, tiles[0], x if qkv_bias is None else qkv_bias, bias,
            bias if head_scale is None else head_scale, x if pad_qkv is None else pad_qkv,
            proj_weight, tiles[1], x if proj_bias is None else proj_bias,
            fc1_weight, tiles[2], fc1_bias, fc2_weight, tiles[3], fc2_bias, *norms, out,
            scale * LOG2_E, eps, H, W, rows, cols,
            WIDTH=width, PARTS=parts, NH=num_heads, D=D, HIDDEN=hidden, BLOCK_H=config.block_h,
            N=tokens, NP=row_tile(tokens), WH=window_size[0], WW=window_size[1],
            SH=shift_size[0], SW=shift_size[1], HAS_PAD=padded, HAS_BIAS=qkv_bias is not None,
            HAS_PROJ_BIAS=proj_bias is not None, POST_NORM=norm1_weight is not None,
            COSINE=head_scale is not None, TMA=config.tma, NUM_STAGES=config.num_stages,
            num_warps=config.num_warps, **options, **pdl_options(pdl, capability),
        )  # fmt: skip
    return out
