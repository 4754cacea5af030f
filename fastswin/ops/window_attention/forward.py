"""Window attention forward in Triton: one program per window and group of heads.

    qkv    [B, H, W, 3, nH, D]   image order, or q, k, v [B_, nH, N, D] when PARTITIONED
    bias   [kinds, nH, NP, NP]   (bias + shift mask) * log2(e), see packing.py
    out    [B, H, W, nH, D]      or [B_, nH, N, D]

Bytes: qkv read once, out written once (4 * tokens * C * itemsize); bias stays in L2. FLOPs:
4 * N per token and channel, 51 per byte at N = 49 in fp16, so short windows are memory bound and
what matters is loads in flight: a program walks over its heads with the next head's q, k, v
already on their way. Shift, padding and partition are address arithmetic (geometry.py); window
rows are addressed relative to their image in 32 bits, images in 64.

``exp2`` on pre-scaled scores, fp32 accumulation throughout. The row maximum of a row that is
entirely -inf is replaced by 0, so such a row gives zeros and no NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import multiprocessor_count, on_device
from fastswin._triton.tiles import next_power_of_2
from fastswin.ops.linear.forward import device_capability
from fastswin.ops.window_attention.config import (
    ONLINE_BLOCK_K,
    WindowAttentionConfig,
    default_config,
)
from fastswin.ops.window_attention.geometry import num_windows
from fastswin.ops.window_attention.packing import LOG2_E

Pair = tuple[int, int]


@triton.jit
def _token_rows(
    window_row, window_col, token, H, W,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
):  # fmt: skip
    """Row of each token in its image's ``[H * W]`` token list; negative where it is padding."""
    row = window_row * WH + token // WW
    col = window_col * WW + token % WW
    if SH > 0:
        padded_h = (H + WH - 1) // WH * WH
        row = tl.where(row + SH >= padded_h, row + SH - padded_h, row + SH)
    if SW > 0:
        padded_w = (W + WW - 1) // WW * WW
        col = tl.where(col + SW >= padded_w, col + SW - padded_w, col + SW)
    return tl.where((row < H) & (col < W), row * W + col, -1)


@triton.jit
def _load_rows(
    ptr, pad_ptr, row, token, stride_row, N: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, HAS_PAD: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_N, BLOCK_D]`` rows of one head; padded tokens read ``pad_ptr`` (a qkv bias)."""
    d = tl.arange(0, BLOCK_D)
    valid = (token < N)[:, None]
    if D != BLOCK_D:
        valid = valid & (d < D)[None, :]
    if HAS_PAD:
        real = (row >= 0)[:, None]
        x = tl.load(ptr + row[:, None] * stride_row + d[None, :], mask=valid & real, other=0.0)
        pad = tl.load(pad_ptr + d, mask=d < D, other=0.0).to(x.dtype)
        return tl.where(valid & (row < 0)[:, None], pad[None, :], x)
    return tl.load(ptr + row[:, None] * stride_row + d[None, :], mask=valid, other=0.0)


@triton.jit
def _inverse_norm(x):
    """``1 / max(||row||, 1e-12)`` in fp32, as torch.nn.functional.normalize has it."""
    x = x.to(tl.float32)
    return 1.0 / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-12)


@triton.jit
def _scores(
    q, q_norm, k, scale, bias_ptr, mask_ptr, query, key, bias_valid, NP: tl.constexpr,
    COSINE: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of one tile in log2 units, ``[BLOCK_Q, BLOCK_K]`` fp32."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if COSINE:  # norms are applied to fp32 products: q, k stay exact in half precision
        s = s * q_norm[:, None] * _inverse_norm(k)[None, :]
    offset = query[:, None] * NP + key[None, :]
    bias = tl.load(bias_ptr + offset, mask=bias_valid, other=-float("inf")).to(tl.float32)
    s = s * scale + bias
    if HAS_MASK:
        m = tl.load(mask_ptr + offset, mask=bias_valid, other=-float("inf"))
        s = tl.where(m == -float("inf"), m, s + m)  # a hidden NaN stays hidden
    return s


@triton.jit
def _window_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, bias_ptr, mask_ptr, head_scale_ptr, pad_ptr, scale,
    H, W, windows_per_col, windows_per_row, num_masks,
    q_stride_image, q_stride_row, q_stride_head,
    k_stride_image, k_stride_row, k_stride_head,
    v_stride_image, v_stride_row, v_stride_head,
    out_stride_image, out_stride_row, out_stride_head,
    N: tl.constexpr, NP: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr, HAS_PAD: tl.constexpr, COSINE: tl.constexpr,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_Q: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    HEADS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (window, HEADS heads); the whole row of keys in tiles K1 + K2.

    An "image" is a window when PARTITIONED: its rows are the window's tokens.
    """
    pid = tl.program_id(0)
    head_groups: tl.constexpr = NH // HEADS
    window = pid // head_groups
    first_head = pid % head_groups * HEADS
    if PARTITIONED:
        image = window.to(tl.int64)
        window_row = 0
        window_col = 0
        kind = 0
    else:
        per_image = windows_per_col * windows_per_row
        image = (window // per_image).to(tl.int64)
        window_row = window % per_image // windows_per_row
        window_col = window % windows_per_row
        kind = 0
        if SH + SW > 0:
            kind = (window_row == windows_per_col - 1).to(tl.int32) * 2
            kind += (window_col == windows_per_row - 1).to(tl.int32)
    q_ptr += image * q_stride_image
    k_ptr += image * k_stride_image
    v_ptr += image * v_stride_image
    out_ptr += image * out_stride_image
    bias_ptr += kind * (NH * NP * NP)
    if HAS_MASK:
        mask_ptr += (window % num_masks).to(tl.int64) * (NP * NP)

    key1 = tl.arange(0, K1)
    row1 = key1
    key2 = K1 + tl.arange(0, K2 if K2 > 0 else 16)
    row2 = key2
    if not PARTITIONED:
        row1 = _token_rows(window_row, window_col, key1, H, W, WH, WW, SH, SW)
        row2 = _token_rows(window_row, window_col, key2, H, W, WH, WW, SH, SW)
    if WIDE:
        row1 = row1.to(tl.int64)
        row2 = row2.to(tl.int64)
    d = tl.arange(0, BLOCK_D)

    for i in tl.range(0, HEADS, num_stages=NUM_STAGES):
        head = first_head + i
        pad_q = pad_ptr + head * D
        pad_k = pad_ptr + (NH + head) * D
        pad_v = pad_ptr + (2 * NH + head) * D
        kh_ptr = k_ptr + head * k_stride_head
        vh_ptr = v_ptr + head * v_stride_head
        k1 = _load_rows(kh_ptr, pad_k, row1, key1, k_stride_row, N, D, BLOCK_D, HAS_PAD)
        v1 = _load_rows(vh_ptr, pad_v, row1, key1, v_stride_row, N, D, BLOCK_D, HAS_PAD)
        if K2 > 0:
            k2 = _load_rows(kh_ptr, pad_k, row2, key2, k_stride_row, N, D, BLOCK_D, HAS_PAD)
            v2 = _load_rows(vh_ptr, pad_v, row2, key2, v_stride_row, N, D, BLOCK_D, HAS_PAD)
        head_scale = scale
        if COSINE:
            head_scale = tl.load(head_scale_ptr + head)
        bias_head = bias_ptr + head * (NP * NP)
        for q_start in tl.range(0, N, BLOCK_Q):
            query = q_start + tl.arange(0, BLOCK_Q)
            row = query
            if not PARTITIONED:
                row = _token_rows(window_row, window_col, query, H, W, WH, WW, SH, SW)
            if WIDE:
                row = row.to(tl.int64)
            q = _load_rows(
                q_ptr + head * q_stride_head, pad_q, row, query, q_stride_row,
                N, D, BLOCK_D, HAS_PAD,
            )  # fmt: skip
            q_norm = _inverse_norm(q) if COSINE else 1.0
            # rows past NP exist only where BLOCK_Q does not divide it; they are not stored
            in_table = (query < NP)[:, None] & (key1 < NP)[None, :]
            s1 = _scores(
                q, q_norm, k1, head_scale, bias_head, mask_ptr, query, key1, in_table, NP,
                COSINE, HAS_MASK, PRECISION,
            )  # fmt: skip
            row_max = tl.max(s1, 1)
            if K2 > 0:
                in_table = (query < NP)[:, None] & (key2 < NP)[None, :]
                s2 = _scores(
                    q, q_norm, k2, head_scale, bias_head, mask_ptr, query, key2, in_table, NP,
                    COSINE, HAS_MASK, PRECISION,
                )  # fmt: skip
                row_max = tl.maximum(row_max, tl.max(s2, 1))
            row_max = tl.where(row_max == -float("inf"), 0.0, row_max)
            p1 = tl.exp2(s1 - row_max[:, None])
            total = tl.sum(p1, 1)
            o = tl.dot(p1.to(v1.dtype), v1, input_precision=PRECISION)
            if K2 > 0:
                p2 = tl.exp2(s2 - row_max[:, None])
                total += tl.sum(p2, 1)
                o = tl.dot(p2.to(v2.dtype), v2, o, input_precision=PRECISION)
            o = o / tl.where(total == 0.0, 1.0, total)[:, None]
            keep = ((query < N) & (row >= 0))[:, None] & (d < D)[None, :]
            o_ptr = out_ptr + head * out_stride_head + row[:, None] * out_stride_row + d[None, :]
            tl.store(o_ptr, o.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _window_attention_fwd_online_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, bias_ptr, mask_ptr, head_scale_ptr, pad_ptr, scale,
    H, W, windows_per_col, windows_per_row, num_masks,
    q_stride_image, q_stride_row, q_stride_head,
    k_stride_image, k_stride_row, k_stride_head,
    v_stride_image, v_stride_row, v_stride_head,
    out_stride_image, out_stride_row, out_stride_head,
    N: tl.constexpr, NP: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr, HAS_PAD: tl.constexpr, COSINE: tl.constexpr,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (window, head, query tile); keys in tiles with a running maximum."""
    pid = tl.program_id(0)
    query_tiles: tl.constexpr = (N + BLOCK_Q - 1) // BLOCK_Q
    query = pid % query_tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    head = pid // query_tiles % NH
    window = pid // (query_tiles * NH)
    if PARTITIONED:
        image = window.to(tl.int64)
        window_row = 0
        window_col = 0
        kind = 0
    else:
        per_image = windows_per_col * windows_per_row
        image = (window // per_image).to(tl.int64)
        window_row = window % per_image // windows_per_row
        window_col = window % windows_per_row
        kind = 0
        if SH + SW > 0:
            kind = (window_row == windows_per_col - 1).to(tl.int32) * 2
            kind += (window_col == windows_per_row - 1).to(tl.int32)
    q_ptr += image * q_stride_image + head * q_stride_head
    k_ptr += image * k_stride_image + head * k_stride_head
    v_ptr += image * v_stride_image + head * v_stride_head
    out_ptr += image * out_stride_image + head * out_stride_head
    bias_ptr += (kind * NH + head) * (NP * NP)
    if HAS_MASK:
        mask_ptr += (window % num_masks).to(tl.int64) * (NP * NP)
    if COSINE:
        scale = tl.load(head_scale_ptr + head)

    row = query
    if not PARTITIONED:
        row = _token_rows(window_row, window_col, query, H, W, WH, WW, SH, SW)
    if WIDE:
        row = row.to(tl.int64)
    q = _load_rows(
        q_ptr, pad_ptr + head * D, row, query, q_stride_row, N, D, BLOCK_D, HAS_PAD
    )  # fmt: skip
    q_norm = _inverse_norm(q) if COSINE else 1.0
    running_max = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    o = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for k_start in tl.range(0, N, BLOCK_K, num_stages=NUM_STAGES):
        key = k_start + tl.arange(0, BLOCK_K)
        key_row = key
        if not PARTITIONED:
            key_row = _token_rows(window_row, window_col, key, H, W, WH, WW, SH, SW)
        if WIDE:
            key_row = key_row.to(tl.int64)
        k = _load_rows(
            k_ptr, pad_ptr + (NH + head) * D, key_row, key, k_stride_row, N, D, BLOCK_D, HAS_PAD
        )  # fmt: skip
        v = _load_rows(
            v_ptr, pad_ptr + (2 * NH + head) * D, key_row, key, v_stride_row,
            N, D, BLOCK_D, HAS_PAD,
        )  # fmt: skip
        in_table = (query < NP)[:, None] & (key < NP)[None, :]
        s = _scores(
            q, q_norm, k, scale, bias_ptr, mask_ptr, query, key, in_table, NP,
            COSINE, HAS_MASK, PRECISION,
        )  # fmt: skip
        new_max = tl.maximum(running_max, tl.max(s, 1))
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        p = tl.exp2(s - shift[:, None])
        rescale = tl.exp2(running_max - shift)
        total = total * rescale + tl.sum(p, 1)
        o = o * rescale[:, None]
        o = tl.dot(p.to(v.dtype), v, o, input_precision=PRECISION)
        running_max = new_max
    o = o / tl.where(total == 0.0, 1.0, total)[:, None]
    d = tl.arange(0, BLOCK_D)
    keep = ((query < N) & (row >= 0))[:, None] & (d < D)[None, :]
    o_ptr = out_ptr + row[:, None] * out_stride_row + d[None, :]
    tl.store(o_ptr, o.to(out_ptr.dtype.element_ty), mask=keep)


def window_attention_fwd(
    qkv: torch.Tensor,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    qkv_bias: torch.Tensor | None,
    scale: float,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    tf32: bool,
    out: torch.Tensor | None = None,
    config: WindowAttentionConfig | None = None,
) -> torch.Tensor:
    """Launch on a contiguous ``qkv [B, H, W, 3C]``; ``bias`` and ``head_scale`` are packed."""
    B, H, W, channels = qkv.shape
    C = channels // 3
    D = C // num_heads
    if out is None:
        out = qkv.new_empty(B, H, W, C)
    if B == 0:
        return out
    rows, cols = num_windows((H, W), window_size)
    padded = (rows * window_size[0], cols * window_size[1]) != (H, W)
    if padded and qkv_bias is None:
        qkv_bias = qkv.new_zeros(channels)
    _launch(
        (qkv, qkv[..., C:], qkv[..., 2 * C :]), out, bias, None, head_scale, qkv_bias, scale,
        [(H * W * channels, channels, D)] * 3 + [(H * W * C, C, D)],
        windows=B * rows * cols, map_size=(H, W), grid_size=(rows, cols), heads=num_heads,
        head_dim=D, window_size=window_size, shift_size=shift_size, partitioned=False,
        padded=padded, tf32=tf32, config=config,
    )  # fmt: skip
    return out


def window_attention_partitioned_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    head_scale: torch.Tensor | None,
    scale: float,
    tf32: bool,
    config: WindowAttentionConfig | None = None,
) -> torch.Tensor:
    """Launch on ``q, k, v [B_, nH, N, D]`` of any strides but the last; arguments are packed."""
    windows, heads, N, D = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    strides = [(t.stride(0), t.stride(2), t.stride(1)) for t in (q, k, v, out)]
    _launch(
        (q, k, v), out, bias, mask, head_scale, None, scale, strides,
        windows=windows, map_size=(1, N), grid_size=(1, 1), heads=heads, head_dim=D,
        window_size=(1, N), shift_size=(0, 0), partitioned=True, padded=False, tf32=tf32,
        config=config,
    )  # fmt: skip
    return out


def _launch(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    head_scale: torch.Tensor | None,
    pad: torch.Tensor | None,
    scale: float,
    strides: list[tuple[int, int, int]],
    *,
    windows: int,
    map_size: Pair,
    grid_size: Pair,
    heads: int,
    head_dim: int,
    window_size: Pair,
    shift_size: Pair,
    partitioned: bool,
    padded: bool,
    tf32: bool,
    config: WindowAttentionConfig | None,
) -> None:
    q = qkv[0]
    N = window_size[0] * window_size[1]
    if config is None:
        config = default_config(
            windows, N, heads, head_dim, q.element_size(), multiprocessor_count(q.device),
            device_capability(q.device),
        )  # fmt: skip
    # in-image offsets are 32-bit unless a single image passes 2**31 elements
    wide = any(row * map_size[0] * map_size[1] >= 2**31 for _, row, _ in strides)
    constants = {
        "N": N, "NP": bias.shape[-1], "NH": heads, "D": head_dim,
        "BLOCK_D": max(16, next_power_of_2(head_dim)), "WH": window_size[0], "WW": window_size[1],
        "SH": shift_size[0], "SW": shift_size[1], "PARTITIONED": partitioned, "HAS_PAD": padded,
        "COSINE": head_scale is not None, "HAS_MASK": mask is not None,
        "PRECISION": "tf32" if tf32 else "ieee", "WIDE": wide, "BLOCK_Q": config.block_q,
        "NUM_STAGES": config.num_stages,
    }  # fmt: skip
    if config.key_tiles:
        kernel = _window_attention_fwd_kernel
        tiles = (*config.key_tiles, 0)
        constants |= {"K1": tiles[0], "K2": tiles[1], "HEADS": config.heads_per_program}
        programs = windows * (heads // config.heads_per_program)
    else:
        kernel = _window_attention_fwd_online_kernel
        constants |= {"BLOCK_K": ONLINE_BLOCK_K}
        programs = windows * heads * -(-N // config.block_q)
    if programs >= 2**31:
        raise ValueError(f"{programs} programs exceed the grid limit of 2**31 - 1; split the batch")
    with on_device(q.device):
        kernel[(programs,)](
            *qkv, out, bias, mask if mask is not None else bias,
            head_scale if head_scale is not None else bias,
            pad if pad is not None else bias, scale * LOG2_E,
            *map_size, *grid_size, mask.shape[0] if mask is not None else 1,
            *(s for triple in strides for s in triple), **constants, num_warps=config.num_warps,
        )  # fmt: skip
