"""Window attention of windows that exist already, as it is trained: forward, backward, fakes.

Tensors: ``q, k, v [B_, nH, N, D]``; ``bias [nH, N, N]``; ``mask [nW, N, N]``; ``seed`` of the
dropout, or None. The order of arguments is that of the schemas in training.py.
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

Tensors5 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: Optional,
    mask: Optional,
    logit_scale: Optional,
    seed: Optional,
    scale: float,
    tf32: bool,
    dropout_p: float,
    save_stats: bool,
    split: bool = False,
) -> Tensors2:
    """``(out [B_, nH, N, D], row_stats)``."""
    from fastswin.ops.window_attention.forward import window_attention_partitioned_fwd
    from fastswin.ops.window_attention.launch import Dropout
    from fastswin.ops.window_attention.packing import pack_mask
    from fastswin.ops.window_attention.tables import pack_tables

    _, heads, N, _ = q.shape
    row_stats = q.new_empty((*q.shape[:3], 2) if save_stats else 0, dtype=torch.float32)
    if q.numel() == 0:
        return torch.empty_like(q, memory_format=torch.contiguous_format), row_stats
    packed, head_scale = pack_tables(bias, logit_scale, heads, (1, N), (0, 0), q.device)
    out = window_attention_partitioned_fwd(
        q, k, v, packed, pack_mask(mask), head_scale, scale, tf32,
        row_stats=row_stats if save_stats else None,
        dropout=None if seed is None else Dropout(seed, dropout_p), split=split,
    )  # fmt: skip
    return out, row_stats


def forward_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: Optional,
    mask: Optional,
    logit_scale: Optional,
    seed: Optional,
    scale: float,
    tf32: bool,
    dropout_p: float,
    save_stats: bool,
    split: bool = False,
) -> Tensors2:
    """Shapes of :func:`forward`."""
    row_stats = q.new_empty((*q.shape[:3], 2) if save_stats else (0,), dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), row_stats


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: Optional,
    row_stats: Optional,
    bias: Optional,
    mask: Optional,
    logit_scale: Optional,
    seed: Optional,
    scale: float,
    tf32: bool,
    dropout_p: float,
    needs: Sequence[bool],
) -> Tensors5:
    """``(dq, dk, dv, dbias, dlogit_scale)``, empty where ``needs`` says no."""
    from fastswin.ops.window_attention.backward import window_attention_partitioned_bwd
    from fastswin.ops.window_attention.backward_problem import Needs
    from fastswin.ops.window_attention.launch import Dropout
    from fastswin.ops.window_attention.packing import pack_mask
    from fastswin.ops.window_attention.tables import pack_tables

    _, heads, N, _ = q.shape
    packed, head_scale = pack_tables(bias, logit_scale, heads, (1, N), (0, 0), q.device)
    (dq, dk, dv), sums = window_attention_partitioned_bwd(
        grad, q, k, v, out, row_stats, packed, pack_mask(mask), head_scale, scale, tf32,
        Needs(needs[0], needs[1], needs[2], needs[3], needs[4], pad=False, qkv_sum=False),
        None if seed is None else Dropout(seed, dropout_p),
    )  # fmt: skip
    return dq, dk, dv, *shared_gradients(sums, bias, logit_scale, q)


def backward_fake(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: Optional,
    row_stats: Optional,
    bias: Optional,
    mask: Optional,
    logit_scale: Optional,
    seed: Optional,
    scale: float,
    tf32: bool,
    dropout_p: float,
    needs: Sequence[bool],
) -> Tensors5:
    """Shapes of :func:`backward`."""
    return (
        like_or_empty(q, q, needs[0]),
        like_or_empty(q, k, needs[1]),
        like_or_empty(q, v, needs[2]),
        like_or_empty(q, bias, needs[3]),
        like_or_empty(q, logit_scale, needs[4]),
    )
