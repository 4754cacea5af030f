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
from fastswin._triton.pdl import launch_dependents, pdl_options, prefetch_l2, wait_for_previous
from fastswin.ops.attention_half.config import (
    WholeWindowConfig,
    column_parts,
    default_whole_window_config,
    row_tile,
)
from fastswin.ops.attention_half.tile import load_parts, locate_rows, store_parts
from fastswin.ops.attention_half.window import add_normed, attention_sums
from fastswin.ops.window_attention.geometry import num_windows
from fastswin.ops.window_attention.launch import check_grid
from fastswin.ops.window_attention.packing import LOG2_E

Pair = tuple[int, int]


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
    launch_dependents(PDL)
    C: tl.constexpr = WIDTH * PARTS
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
    wait_for_previous(PDL)
    acc_a, acc_b, acc_c = attention_sums(
        x_ptr, at, live, padded, pair, qkv_ptr, qkv_desc, qkv_bias_ptr, offset_ptr, bias_ptr,
        head_scale_ptr, pad_ptr, proj_ptr, proj_desc, proj_bias_ptr, scale, eps,
        WIDTH, PARTS, NH, D, NP, HAS_PAD, HAS_OFFSET, HAS_BIAS, HAS_PROJ_BIAS, NORM_FIRST,
        POST_NORM, COSINE, TMA, NUM_STAGES,
    )  # fmt: skip
    if POST_NORM:
        xa, xb, xc = load_parts(x_ptr, at, live, WIDTH, PARTS)
        acc_a, acc_b, acc_c = add_normed(
            xa, xb, xc, acc_a, acc_b, acc_c, norm_weight_ptr, norm_bias_ptr, eps, WIDTH, PARTS
        )
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
