"""Schemas, fake kernels and dispatch of the residual and norm operators; imports no Triton.

``norm`` says what is normed: 0 nothing, 1 the stream, 2 the branch. An output that a call does not
ask for is an empty tensor of no elements. Gradients: autograd.py.
"""

from __future__ import annotations

import torch

#: Values of ``norm``.
NO_NORM, NORM_STREAM, NORM_BRANCH = 0, 1, 2

Tensors4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Tensors5 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_TAGS = (torch.Tag.pt2_compliant_tag,)

torch.library.define(
    "fastswin::residual_norm_fwd",
    "(Tensor x, Tensor? branch, Tensor? weight, Tensor? bias, Tensor? branch_bias, "
    "Tensor? branch_scale, float eps, int norm, ScalarType stream_dtype, ScalarType norm_dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "fastswin::residual_norm_bwd",
    "(Tensor? d_stream, Tensor? d_normed, Tensor? z, Tensor? mean, Tensor? rstd, Tensor? weight, "
    "Tensor? z_bias, Tensor? branch_scale, int norm, bool[4] needs, ScalarType x_dtype, "
    "ScalarType branch_dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


@torch.library.impl("fastswin::residual_norm_fwd", "default")
def _fwd(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    branch_scale: torch.Tensor | None,
    eps: float,
    norm: int,
    stream_dtype: torch.dtype,
    norm_dtype: torch.dtype,
) -> Tensors4:
    from fastswin.ops.residual_norm.forward import residual_norm_fwd

    return residual_norm_fwd(
        x, branch, weight, bias, branch_bias, branch_scale, eps, norm, stream_dtype, norm_dtype
    )


@torch.library.register_fake("fastswin::residual_norm_fwd")
def _fwd_fake(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    branch_scale: torch.Tensor | None,
    eps: float,
    norm: int,
    stream_dtype: torch.dtype,
    norm_dtype: torch.dtype,
) -> Tensors4:
    rows = x.shape[:-1] if norm else (0,)
    return (
        x.new_empty(x.shape if branch is not None else (0,), dtype=stream_dtype),
        x.new_empty(x.shape if norm == NORM_STREAM else (0,), dtype=norm_dtype),
        x.new_empty(rows, dtype=torch.float32),
        x.new_empty(rows, dtype=torch.float32),
    )


@torch.library.impl("fastswin::residual_norm_bwd", "default")
def _bwd(
    d_stream: torch.Tensor | None,
    d_normed: torch.Tensor | None,
    z: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
    weight: torch.Tensor | None,
    z_bias: torch.Tensor | None,
    branch_scale: torch.Tensor | None,
    norm: int,
    needs: list[bool],
    x_dtype: torch.dtype,
    branch_dtype: torch.dtype,
) -> Tensors5:
    from fastswin.ops.residual_norm.backward import residual_norm_bwd

    return residual_norm_bwd(
        d_stream, d_normed, z, mean, rstd, weight, z_bias, branch_scale, norm, needs,
        x_dtype, branch_dtype,
    )  # fmt: skip


@torch.library.register_fake("fastswin::residual_norm_bwd")
def _bwd_fake(
    d_stream: torch.Tensor | None,
    d_normed: torch.Tensor | None,
    z: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
    weight: torch.Tensor | None,
    z_bias: torch.Tensor | None,
    branch_scale: torch.Tensor | None,
    norm: int,
    needs: list[bool],
    x_dtype: torch.dtype,
    branch_dtype: torch.dtype,
) -> Tensors5:
    like = d_stream if d_stream is not None else d_normed
    assert like is not None
    C = like.shape[-1:]
    return (
        like.new_empty(like.shape if needs[0] else (0,), dtype=x_dtype),
        like.new_empty(like.shape if needs[1] else (0,), dtype=branch_dtype),
        like.new_empty(C if needs[2] else (0,), dtype=torch.float32),
        like.new_empty(C if needs[2] else (0,), dtype=torch.float32),
        like.new_empty(C if needs[3] else (0,), dtype=torch.float32),
    )


residual_norm_fwd = torch.ops.fastswin.residual_norm_fwd
residual_norm_bwd = torch.ops.fastswin.residual_norm_bwd
