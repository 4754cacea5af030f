"""Window attention backward: entry points, choice of the form, second stage of the sums.

Windows of up to 64 tokens go through one kernel that saves nothing (backward_runs.py, which holds
the bias of one kind of window, or backward_whole.py), longer ones through tiles that read the
forward's output and row statistics (backward_tiles.py). dqkv is written in image order by the
forward's own index arithmetic. A padded token has no place there: its dk and dv go to a scratch
list, whose sum is the gradient of ``qkv_bias`` (its dq is 0, as its output is cut away).

dbias and dlogit_scale leave the kernels as one partial sum per run of windows, which are added in
a fixed order, in fp32: dbias by one kernel, which adds a bias table's pairs as well (tables.py).
"""

from __future__ import annotations

import dataclasses

import torch

from fastswin._triton.device import device_capability
from fastswin.ops.window_attention.backward_config import (
    BackwardConfig,
    TiledBackwardConfig,
    WholeBackwardConfig,
    default_backward_config,
)
from fastswin.ops.window_attention.backward_problem import BackwardProblem, Needs, Partials
from fastswin.ops.window_attention.backward_runs import launch_runs
from fastswin.ops.window_attention.backward_tiles import launch_tiles
from fastswin.ops.window_attention.backward_whole import launch_whole
from fastswin.ops.window_attention.forward import (
    window_attention_fwd,
    window_attention_partitioned_fwd,
)
from fastswin.ops.window_attention.launch import (
    AttentionShape,
    Dropout,
    image_shape,
    output_strides,
    partitioned_shape,
    qkv_strides,
    window_strides,
)
from fastswin.ops.window_attention.tables import dense_gradient, table_gradient

Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Sums:
    """fp32 gradients that are sums over windows, None where not needed.

    Attributes:
        bias: ``[nH, N, N]``, or like the bias table, in its dtype.
        logit_scale: ``[nH]``, of ``log(temperature)``, before its clamp.
        qkv_bias: ``[3C]``, over padded tokens or over all.
    """

    bias: torch.Tensor | None
    logit_scale: torch.Tensor | None
    qkv_bias: torch.Tensor | None


def window_attention_bwd(
    grad: torch.Tensor,
    qkv: torch.Tensor,
    out: torch.Tensor | None,
    row_stats: torch.Tensor | None,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    qkv_bias: torch.Tensor | None,
    scale: float,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    tf32: bool,
    needs: Needs,
    dropout: Dropout | None = None,
    config: BackwardConfig | None = None,
    bias_table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Sums]:
    """Gradients of ``qkv [B, H, W, 3C]`` (contiguous) and of what is shared by its windows.

    Args:
        grad: ``[B, H, W, C]``, any strides.
        out, row_stats: the forward's; without them the tiled form runs the forward again.
        bias, head_scale: packed.
        needs: q, k and v count as one here.
        bias_table: what the packed bias was made of, where that was a table.

    Returns:
        dqkv (uninitialised where not needed), and the sums.
    """
    shape = image_shape(qkv, num_heads, window_size, shift_size)
    C = qkv.shape[3] // 3
    dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    if shape.padding_slots and qkv_bias is None:
        qkv_bias = qkv.new_zeros(3 * C)
    config = config or _default_config(qkv, shape, head_scale is None and dropout is None)
    # in the kernel all tokens are summed, padded ones too; apart from it, a pass over dqkv
    in_kernel = needs.qkv_sum and isinstance(config, WholeBackwardConfig) and config.sums_qkv
    apart = needs.qkv_sum and not in_kernel
    padded = needs.pad and shape.padding_slots > 0 and not in_kernel
    needs = dataclasses.replace(needs, pad=padded, qkv_sum=in_kernel)
    if apart:
        needs = dataclasses.replace(needs, q=True, k=True, v=True)
    if isinstance(config, TiledBackwardConfig) and (out is None or row_stats is None):
        row_stats = _new_stats(qkv, shape.windows, shape.heads, shape.tokens)
        out = window_attention_fwd(
            qkv, bias, head_scale, qkv_bias, scale, num_heads, window_size, shift_size, tf32,
            row_stats=row_stats, dropout=dropout,
        )  # fmt: skip
    problem = BackwardProblem(
        shape, qkv, qkv[..., C:], qkv[..., 2 * C :], grad.contiguous(), out, row_stats, bias, None,
        head_scale, qkv_bias, scale, tf32, dropout, needs, dqkv, dqkv[..., C:], dqkv[..., 2 * C :],
        [*qkv_strides(shape), output_strides(shape), qkv_strides(shape)[0]],
    )  # fmt: skip
    sums = _finish(problem, _launch(problem, config), bias_table)
    if apart:
        total = dqkv.flatten(0, 2).sum(0, dtype=torch.float32)
        total = total if sums.qkv_bias is None else total + sums.qkv_bias
        sums = dataclasses.replace(sums, qkv_bias=total)
    return dqkv, sums


def window_attention_partitioned_bwd(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    row_stats: torch.Tensor | None,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    head_scale: torch.Tensor | None,
    scale: float,
    tf32: bool,
    needs: Needs,
    dropout: Dropout | None = None,
    config: BackwardConfig | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], Sums]:
    """Gradients of ``q, k, v [B_, nH, N, D]`` (uninitialised where not needed), and the sums."""
    shape = partitioned_shape(q)
    dq, dk, dv = (
        torch.empty_like(q, memory_format=torch.contiguous_format) if needed else q.new_empty(0)
        for needed in (needs.q, needs.k, needs.v)
    )
    q, k, v, grad = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v, grad))
    plain = head_scale is None and mask is None and dropout is None
    config = config or _default_config(q, shape, plain)
    if isinstance(config, TiledBackwardConfig) and (out is None or row_stats is None):
        row_stats = _new_stats(q, shape.windows, shape.heads, shape.tokens)
        out = window_attention_partitioned_fwd(
            q, k, v, bias, mask, head_scale, scale, tf32, row_stats=row_stats, dropout=dropout
        )
    problem = BackwardProblem(
        shape, q, k, v, grad, out, row_stats, bias, mask, head_scale, None, scale, tf32, dropout,
        needs, dq, dk, dv, [*(window_strides(t) for t in (q, k, v, grad)), output_strides(shape)],
    )  # fmt: skip
    return (dq, dk, dv), _finish(problem, _launch(problem, config))


def _default_config(q: torch.Tensor, shape: AttentionShape, plain: bool) -> BackwardConfig:
    return default_backward_config(
        shape.tokens, shape.head_dim, q.element_size(), device_capability(q.device),
        plain and shape.padding_slots == 0,
    )  # fmt: skip


def _new_stats(like: torch.Tensor, windows: int, heads: int, tokens: int) -> torch.Tensor:
    return torch.empty(windows, heads, tokens, 2, dtype=torch.float32, device=like.device)


def _launch(problem: BackwardProblem, config: BackwardConfig) -> Partials:
    if not problem.needs.any:
        return Partials(None, None, None)
    if problem.shape.windows * problem.shape.tokens * problem.shape.head_dim == 0:
        return _empty_partials(problem)
    if isinstance(config, TiledBackwardConfig):
        return launch_tiles(problem, config)
    if config.by_kind:
        return launch_runs(problem, config)
    return launch_whole(problem, config)


def _empty_partials(problem: BackwardProblem) -> Partials:
    """No window: every sum has no terms and is zero."""
    shape, needs, device = problem.shape, problem.needs, problem.grad.device

    def none(*sizes: int) -> torch.Tensor:
        return torch.zeros(*sizes, dtype=torch.float32, device=device)

    return Partials(
        none(0, shape.heads, shape.tokens, shape.tokens) if needs.bias else None,
        none(0, shape.heads) if needs.logit_scale else None,
        none(0, 0, 2 * shape.heads * shape.head_dim) if needs.pad else None,
        none(0, 3, shape.heads, shape.head_dim) if needs.qkv_sum else None,
    )


def _finish(
    problem: BackwardProblem, partials: Partials, bias_table: torch.Tensor | None = None
) -> Sums:
    """Second stage: add what the programs left."""
    N = problem.shape.tokens
    bias = logit_scale = qkv_bias = None
    if partials.bias is not None and bias_table is not None:
        bias = table_gradient(partials.bias, bias_table, problem.shape.window_size)
    elif partials.bias is not None:
        bias = dense_gradient(partials.bias, N)
    if partials.logit_scale is not None:
        logit_scale = partials.logit_scale.transpose(0, 1).flatten(1).sum(1)
    if partials.pad is not None:
        keys_and_values = partials.pad.sum((0, 1))
        zeros = keys_and_values.new_zeros(keys_and_values.shape[0] // 2)
        qkv_bias = torch.cat((zeros, keys_and_values))
    if partials.qkv is not None:
        qkv_bias = partials.qkv.sum(0).flatten()
    return Sums(bias, logit_scale, qkv_bias)
