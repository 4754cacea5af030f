"""The differentiable operators: schema, fake kernels and dispatch; imports no Triton.

They take raw arguments (``bias`` dense, or in image order a table ``[rows, nH]``), pack them inside
(tables.py) and keep for the backward nothing but them, the seed and, where the backward works in
tiles, output and row statistics. A compiled graph holds one opaque node per direction. Empty
tensors stand for what is not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fastswin.ops.window_attention import autograd
from fastswin.ops.window_attention.reference import MAX_LOGIT_SCALE

if TYPE_CHECKING:
    from fastswin.ops.window_attention.backward import Sums

Pair = tuple[int, int]
Tensors2 = tuple[torch.Tensor, torch.Tensor]
Tensors4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Tensors5 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Optional = torch.Tensor | None

_TAGS = (torch.Tag.pt2_compliant_tag,)
_IMAGE = "Tensor? bias, Tensor? logit_scale, Tensor? qkv_bias, Tensor? seed"
_IMAGE_OPTIONS = (
    "float scale, int num_heads, int[2] window_size, int[2] shift_size, bool tf32, "
    "float dropout_p, bool sum_qkv_grad"
)
_PARTITIONED = "Tensor? bias, Tensor? mask, Tensor? logit_scale, Tensor? seed"
_PARTITIONED_OPTIONS = "float scale, bool tf32, float dropout_p"

torch.library.define(
    "fastswin::window_attention",
    f"(Tensor qkv, {_IMAGE}, {_IMAGE_OPTIONS}, bool save_stats, bool split=False) -> "
    "(Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "fastswin::window_attention_bwd",
    f"(Tensor grad, Tensor qkv, Tensor? out, Tensor? row_stats, {_IMAGE}, {_IMAGE_OPTIONS}, "
    "bool[4] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "fastswin::window_attention_partitioned",
    f"(Tensor q, Tensor k, Tensor v, {_PARTITIONED}, {_PARTITIONED_OPTIONS}, bool save_stats, "
    "bool split=False) -> (Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "fastswin::window_attention_partitioned_bwd",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? out, Tensor? row_stats, "
    f"{_PARTITIONED}, {_PARTITIONED_OPTIONS}, bool[5] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def _pair(values: Sequence[int]) -> Pair:
    return values[0], values[1]  # the dispatcher hands over lists


@torch.library.impl("fastswin::window_attention", "default")
def _fwd(
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


@torch.library.register_fake("fastswin::window_attention")
def _fwd_fake(
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


@torch.library.impl("fastswin::window_attention_bwd", "default")
def _bwd(
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
    dbias, dlogit_scale = _shared_gradients(sums, bias, logit_scale, qkv)
    dqkv_bias = qkv.new_empty(0)
    if needs[3] and qkv_bias is not None:
        found = sums.qkv_bias
        dqkv_bias = torch.zeros_like(qkv_bias) if found is None else found.to(qkv_bias.dtype)
    return dqkv if needs[0] else qkv.new_empty(0), dbias, dlogit_scale, dqkv_bias


def _shared_gradients(
    sums: Sums, bias: Optional, logit_scale: Optional, like: torch.Tensor
) -> Tensors2:
    """dbias and dlogit_scale in the shape and dtype of their tensors."""
    dbias = dlogit_scale = like.new_empty(0)
    if sums.bias is not None and bias is not None:
        dbias = sums.bias.to(bias.dtype).contiguous()
    if sums.logit_scale is not None and logit_scale is not None:
        free = logit_scale <= MAX_LOGIT_SCALE  # the clamp passes no gradient above
        dlogit_scale = (sums.logit_scale.view(logit_scale.shape) * free).to(logit_scale.dtype)
    return dbias, dlogit_scale


def _like(like: torch.Tensor, t: Optional, needed: bool) -> torch.Tensor:
    if not needed or t is None:
        return like.new_empty(0)
    return torch.empty_like(t, memory_format=torch.contiguous_format)


@torch.library.register_fake("fastswin::window_attention_bwd")
def _bwd_fake(
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
    return (
        _like(qkv, qkv, needs[0]),
        _like(qkv, bias, needs[1]),
        _like(qkv, logit_scale, needs[2]),
        _like(qkv, qkv_bias, needs[3]),
    )


@torch.library.impl("fastswin::window_attention_partitioned", "default")
def _partitioned_fwd(
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


@torch.library.register_fake("fastswin::window_attention_partitioned")
def _partitioned_fwd_fake(
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
    row_stats = q.new_empty((*q.shape[:3], 2) if save_stats else (0,), dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), row_stats


@torch.library.impl("fastswin::window_attention_partitioned_bwd", "default")
def _partitioned_bwd(
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
    return dq, dk, dv, *_shared_gradients(sums, bias, logit_scale, q)


@torch.library.register_fake("fastswin::window_attention_partitioned_bwd")
def _partitioned_bwd_fake(
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
    return (
        _like(q, q, needs[0]),
        _like(q, k, needs[1]),
        _like(q, v, needs[2]),
        _like(q, bias, needs[3]),
        _like(q, logit_scale, needs[4]),
    )


window_attention = torch.ops.fastswin.window_attention
window_attention_bwd = torch.ops.fastswin.window_attention_bwd
window_attention_partitioned = torch.ops.fastswin.window_attention_partitioned
window_attention_partitioned_bwd = torch.ops.fastswin.window_attention_partitioned_bwd

autograd.register_gradients()
