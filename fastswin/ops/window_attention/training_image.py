"""Window attention in image order as it is trained: forward, backward, and their fakes.

Tensors: ``qkv [B, H, W, 3C]``; ``bias`` dense ``[nH, N, N]`` or a table ``[rows, nH]``; ``seed`` of
the dropout, or None. The order of arguments is that of the schemas in training.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastswin.ops.window_attention.training_gradients import (
    Optional,
    Tensors2,
    like_or_empty,
    shared_gradients,
)

Pair = tuple[int, int]
Tensors4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _pair(values: Sequence[int]) -> Pair:
    return values[0], values[1]  # the dispatcher hands over lists


def forward(
    qkv: torch.Tensor,
    bias: Optional,
    logit_scale: Optional,
    qkv_bias: Optional,
    seed: Optional,
    scale: float,
    num_heads: int,
    window_size: Sequence[int],
    shift_size: Sequence[int],
    tf32: bool,
    dropout_p: float,
    sum_qkv_grad: bool,
    save_stats: bool,
    split: bool = False,
) -> Tensors2:
    """``(out [B, H, W, C], row_stats)``."""
    from fastswin.ops.window_attention.forward import window_attention_fwd
    from fastswin.ops.window_attention.launch import Dropout
    from fastswin.ops.window_attention.tables import pack_tables

    window, shift = _pair(window_size), _pair(shift_size)
    row_stats = _new_stats(qkv, qkv.shape[:3], num_heads, window, save_stats)
    if qkv.numel() == 0:
        return qkv.new_empty(*qkv.shape[:3], qkv.shape[3] // 3), row_stats
    packed, head_scale = pack_tables(bias, logit_scale, num_heads, window, shift, qkv.device)
    out = window_attention_fwd(
        qkv, packed, head_scale, qkv_bias, scale, num_heads, window, shift, tf32,
        row_stats=row_stats if save_stats else None,
        dropout=None if seed is None else Dropout(seed, dropout_p), split=split,
    )  # fmt: skip
    return out, row_stats


def forward_fake(
    qkv: torch.Tensor,
    bias: Optional,
    logit_scale: Optional,
    qkv_bias: Optional,
    seed: Optional,
    scale: float,
    num_heads: int,
    window_size: Sequence[int],
    shift_size: Sequence[int],
    tf32: bool,
    dropout_p: float,
    sum_qkv_grad: bool,
    save_stats: bool,
    split: bool = False,
) -> Tensors2:
    """Shapes of :func:`forward`."""
    out = qkv.new_empty(*qkv.shape[:3], qkv.shape[3] // 3)
    return out, _new_stats(qkv, qkv.shape[:3], num_heads, _pair(window_size), save_stats)


def _new_stats(
    qkv: torch.Tensor, images: Sequence[int], heads: int, window: Pair, save: bool
) -> torch.Tensor:
    """``[windows, nH, N, 2]`` fp32, empty where it is not saved."""
    if not save:
        return qkv.new_empty(0, dtype=torch.float32)
    B, H, W = images
    windows = B * -(-H // window[0]) * -(-W // window[1])
    return qkv.new_empty(windows, heads, window[0] * window[1], 2, dtype=torch.float32)


def backward(
    grad: torch.Tensor,
    qkv: torch.Tensor,
    out: Optional,
    row_stats: Optional,
    bias: Optional,
    logit_scale: Optional,
    qkv_bias: Optional,
    seed: Optional,
    scale: float,
    num_heads: int,
    window_size: Sequence[int],
    shift_size: Sequence[int],
    tf32: bool,
    dropout_p: float,
    sum_qkv_grad: bool,
    needs: Sequence[bool],
) -> Tensors4:
    """``(dqkv, dbias, dlogit_scale, dqkv_bias)``, empty where ``needs`` says no."""
    from fastswin.ops.window_attention.backward import window_attention_bwd
    from fastswin.ops.window_attention.backward_problem import Needs
    from fastswin.ops.window_attention.launch import Dropout
    from fastswin.ops.window_attention.tables import pack_tables

    window, shift = _pair(window_size), _pair(shift_size)
    packed, head_scale = pack_tables(bias, logit_scale, num_heads, window, shift, qkv.device)
    wanted = Needs(
        needs[0], needs[0], needs[0], needs[1], needs[2], needs[3], needs[3] and sum_qkv_grad
    )
    dqkv, sums = window_attention_bwd(
        grad, qkv, out, row_stats, packed, head_scale, qkv_bias, scale, num_heads, window, shift,
        tf32, wanted, None if seed is None else Dropout(seed, dropout_p),
        bias_table=bias if bias is not None and bias.ndim == 2 else None,
    )  # fmt: skip
    dbias, dlogit_scale = shared_gradients(sums, bias, logit_scale, qkv)
    dqkv_bias = qkv.new_empty(0)
    if needs[3] and qkv_bias is not None:
        found = sums.qkv_bias
        dqkv_bias = torch.zeros_like(qkv_bias) if found is None else found.to(qkv_bias.dtype)
    return dqkv if needs[0] else qkv.new_empty(0), dbias, dlogit_scale, dqkv_bias


def backward_fake(
    grad: torch.Tensor,
    qkv: torch.Tensor,
    out: Optional,
    row_stats: Optional,
    bias: Optional,
    logit_scale: Optional,
    qkv_bias: Optional,
    seed: Optional,
    scale: float,
    num_heads: int,
    window_size: Sequence[int],
    shift_size: Sequence[int],
    tf32: bool,
    dropout_p: float,
    sum_qkv_grad: bool,
    needs: Sequence[bool],
) -> Tensors4:
    """Shapes of :func:`backward`."""
    return (
        like_or_empty(qkv, qkv, needs[0]),
        like_or_empty(qkv, bias, needs[1]),
        like_or_empty(qkv, logit_scale, needs[2]),
        like_or_empty(qkv, qkv_bias, needs[3]),
    )
