"""Window attention as plain PyTorch: the definition that the kernels are tested against.

    scores = q @ k.T * scale                                   V1
    scores = cos(q, k) * exp(min(logit_scale, ln 100))         V2
    out    = softmax(scores + bias + mask) @ v

Half-precision inputs are computed in fp32 and rounded once at the end; fp64 stays fp64. It
materialises ``[B_, nH, N, N]`` scores: right, readable and differentiable, not fast.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fastswin.ops.window_attention.dropout import dropout_weights
from fastswin.ops.window_attention.geometry import num_windows, shift_attention_mask

Pair = tuple[int, int]

#: The reference clamps ``logit_scale`` so that the temperature never exceeds 100.
MAX_LOGIT_SCALE = math.log(100.0)

#: Clamp of the L2 norm in cosine attention (``torch.nn.functional.normalize``).
COSINE_EPS = 1e-12


def partition(x: torch.Tensor, window_size: Pair) -> torch.Tensor:
    """``[B, H, W, C]`` with H, W multiples of the window to ``[B * nW, N, C]``."""
    B, H, W, C = x.shape
    rows, cols = window_size
    count = B * (H // rows) * (W // cols)
    x = x.reshape(B, H // rows, rows, W // cols, cols, C)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(count, rows * cols, C)


def unpartition(
    windows: torch.Tensor, window_size: Pair, batch: int, map_size: Pair
) -> torch.Tensor:
    """Inverse of :func:`partition`: ``[B * nW, N, C]`` to ``[B, H, W, C]``."""
    (rows, cols), (H, W) = window_size, map_size
    x = windows.view(batch, H // rows, W // cols, rows, cols, windows.shape[-1])
    return x.permute(0, 1, 3, 2, 4, 5).reshape(batch, H, W, windows.shape[-1])


def window_attention_partitioned_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float,
    logit_scale: torch.Tensor | None,
    dropout_p: float = 0.0,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """``q, k, v [B_, nH, N, D]`` to ``[B_, nH, N, D]``; see the public function."""
    dtype = q.dtype
    compute = torch.promote_types(dtype, torch.float32)
    q, k, v = q.to(compute), k.to(compute), v.to(compute)
    if logit_scale is None:
        scores = (q * scale) @ k.transpose(-2, -1)
    else:
        temperature = logit_scale.to(compute).flatten().clamp(max=MAX_LOGIT_SCALE).exp()
        q = F.normalize(q, dim=-1, eps=COSINE_EPS) * temperature[:, None, None]
        scores = q @ F.normalize(k, dim=-1, eps=COSINE_EPS).transpose(-2, -1)
    if bias is not None:
        scores = scores + bias.to(compute)
    probs = _masked_softmax(scores, mask, compute)
    if dropout_p > 0.0 and seed is not None:
        probs = probs * dropout_weights(seed, dropout_p, *probs.shape[:3]).to(compute)
    return (probs @ v).to(dtype)


def _masked_softmax(
    scores: torch.Tensor, mask: torch.Tensor | None, compute: torch.dtype
) -> torch.Tensor:
    """Softmax over keys; ``mask [nW, N, N]``, bool hides exactly and a hidden row gives zeros."""
    if mask is None:
        return scores.softmax(-1)
    windows, heads, N, keys = scores.shape
    scores = scores.view(windows // mask.shape[0], mask.shape[0], heads, N, keys)
    mask = mask[:, None]
    if mask.dtype.is_floating_point:
        probs = (scores + mask.to(compute)).softmax(-1)
    else:
        hidden = mask != 0
        scores = scores.masked_fill(hidden, -math.inf)
        empty = hidden.all(-1, keepdim=True)
        probs = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return probs.view(windows, heads, N, keys)


def window_attention_ref(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    scale: float,
    logit_scale: torch.Tensor | None,
    qkv_bias: torch.Tensor | None,
    dropout_p: float = 0.0,
    seed: torch.Tensor | None = None,
    sum_qkv_grad: bool = False,
) -> torch.Tensor:
    """``qkv [B, H, W, 3C]`` in image order to ``[B, H, W, C]``; see the public function."""
    B, H, W, channels = qkv.shape
    if sum_qkv_grad and qkv_bias is not None:
        qkv = qkv + (qkv_bias - qkv_bias.detach()).to(qkv.dtype)  # zeros that pass a gradient
    head_dim = channels // (3 * num_heads)
    rows, cols = num_windows((H, W), window_size)
    padded = (rows * window_size[0], cols * window_size[1])
    if padded != (H, W):
        filled = qkv.new_zeros(B, *padded, channels)
        if qkv_bias is not None:
            filled = filled + qkv_bias.to(qkv.dtype)
        top = torch.cat((qkv, filled[:, :H, W:]), dim=2)
        qkv = torch.cat((top, filled[:, H:]), dim=1)
    shifted = shift_size != (0, 0)
    if shifted:
        qkv = torch.roll(qkv, (-shift_size[0], -shift_size[1]), dims=(1, 2))
    tokens = window_size[0] * window_size[1]
    windows = partition(qkv, window_size)
    count = windows.shape[0]
    q, k, v = (
        windows.reshape(count, tokens, 3, num_heads, head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    )
    mask = shift_attention_mask((H, W), window_size, shift_size, qkv.device) if shifted else None
    out = window_attention_partitioned_ref(q, k, v, bias, mask, scale, logit_scale, dropout_p, seed)
    out = out.transpose(1, 2).reshape(count, tokens, channels // 3)
    out = unpartition(out, window_size, B, padded)
    if shifted:
        out = torch.roll(out, shift_size, dims=(1, 2))
    return out[:, :H, :W].contiguous()
