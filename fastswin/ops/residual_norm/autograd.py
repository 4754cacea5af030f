"""Autograd of the residual and norm operators: what is kept, and one backward kernel for each.

    add_layer_norm    d = LN'(d_normed) + d_stream;  dx = d;  dbranch = branch_scale * d
    layer_norm_add    dx = d_stream;  dbranch = LN'(branch_scale * d_stream)
    residual_add      dx = d_stream;  dbranch = branch_scale * d_stream

Kept are the rows that the norm read (the stream, alive anyway, or V2's branch) and two fp32
numbers a row. Where dx and dbranch hold the same numbers in the same dtype they are one tensor.
Not differentiable twice: the second backward raises; ``impl="reference"`` is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fastswin.ops.residual_norm import register
from fastswin.ops.residual_norm.register import NO_NORM, NORM_BRANCH, NORM_STREAM


class ResidualAdd(torch.autograd.Function):
    """``(x, branch, branch_bias, branch_scale, stream_dtype) -> stream``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        branch: torch.Tensor,
        branch_bias: torch.Tensor | None,
        branch_scale: torch.Tensor | None,
        stream_dtype: torch.dtype,
    ) -> torch.Tensor:
        stream, *_ = register.residual_norm_fwd(
            x, branch, None, None, branch_bias, branch_scale, 0.0, NO_NORM, stream_dtype, x.dtype
        )
        ctx.save_for_backward(branch_scale)
        ctx.dtypes = (x.dtype, branch.dtype, None if branch_bias is None else branch_bias.dtype)
        return stream

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_stream: torch.Tensor) -> tuple:
        (branch_scale,) = ctx.saved_tensors
        x_dtype, branch_dtype, bias_dtype = ctx.dtypes
        need_x, need_branch, need_bias = ctx.needs_input_grad[:3]
        dx = d_stream.to(x_dtype) if need_x else None
        same = branch_scale is None and branch_dtype == d_stream.dtype
        d_branch = d_stream if need_branch and same else None
        d_bias = None
        wanted = need_branch and not same
        if wanted or need_bias:
            _, d_new, _, _, d_bias = register.residual_norm_bwd(
                d_stream, None, None, None, None, None, None, branch_scale, NO_NORM,
                [False, wanted, False, need_bias], x_dtype, branch_dtype,
            )  # fmt: skip
            d_branch = d_new if wanted else d_branch
            d_bias = d_bias.to(bias_dtype) if need_bias else None
        return dx, d_branch, d_bias, None, None


class AddLayerNorm(torch.autograd.Function):
    """``(x, branch, weight, bias, branch_bias, branch_scale, ...) -> (stream, normed)``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        branch: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        branch_bias: torch.Tensor | None,
        branch_scale: torch.Tensor | None,
        eps: float,
        stream_dtype: torch.dtype,
        norm_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream, normed, mean, rstd = register.residual_norm_fwd(
            x, branch, weight, bias, branch_bias, branch_scale, eps, NORM_STREAM,
            stream_dtype, norm_dtype,
        )  # fmt: skip
        if branch is None:
            stream = x
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(stream, mean, rstd, weight, branch_scale)
        ctx.dtypes = [
            None if t is None else t.dtype for t in (x, branch, weight, bias, branch_bias)
        ]
        return stream, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_stream: torch.Tensor | None, d_normed: torch.Tensor | None) -> tuple:
        if d_stream is None and d_normed is None:
            return (None,) * 9
        stream, mean, rstd, weight, branch_scale = ctx.saved_tensors
        x_dtype, branch_dtype, weight_dtype, bias_dtype, branch_bias_dtype = ctx.dtypes
        need_x, need_branch, need_weight, need_bias, need_branch_bias = ctx.needs_input_grad[:5]
        same = branch_scale is None and branch_dtype == x_dtype
        affine = (need_weight or need_bias) and d_normed is not None
        dx, d_branch, d_weight, d_bias, d_branch_bias = register.residual_norm_bwd(
            d_stream, d_normed, stream, mean, rstd, weight, None, branch_scale,
            NO_NORM if d_normed is None else NORM_STREAM,
            [need_x or (need_branch and same), need_branch and not same, affine, need_branch_bias],
            x_dtype, branch_dtype or x_dtype,
        )  # fmt: skip
        return (
            dx if need_x else None,
            (dx if same else d_branch) if need_branch else None,
            d_weight.to(weight_dtype) if affine and need_weight else None,
            d_bias.to(bias_dtype) if affine and need_bias else None,
            d_branch_bias.to(branch_bias_dtype) if need_branch_bias else None,
            None,
            None,
            None,
            None,
        )


class LayerNormAdd(torch.autograd.Function):
    """``(x, branch, weight, bias, branch_bias, branch_scale, ...) -> stream``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        branch: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        branch_bias: torch.Tensor | None,
        branch_scale: torch.Tensor | None,
        eps: float,
        stream_dtype: torch.dtype,
    ) -> torch.Tensor:
        stream, _, mean, rstd = register.residual_norm_fwd(
            x, branch, weight, bias, branch_bias, branch_scale, eps, NORM_BRANCH,
            stream_dtype, x.dtype,
        )  # fmt: skip
        ctx.save_for_backward(branch, mean, rstd, weight, branch_bias, branch_scale)
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias)]
        return stream

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_stream: torch.Tensor) -> tuple:
        branch, mean, rstd, weight, branch_bias, branch_scale = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        need_x, need_branch, need_weight, need_bias, need_branch_bias = ctx.needs_input_grad[:5]
        affine = need_weight or need_bias
        dx = d_stream.to(x_dtype) if need_x else None
        d_branch: Any = None
        d_weight: Any = None
        d_bias: Any = None
        d_branch_bias: Any = None
        if need_branch or affine or need_branch_bias:
            _, d_branch, d_weight, d_bias, d_branch_bias = register.residual_norm_bwd(
                d_stream, None, branch, mean, rstd, weight, branch_bias, branch_scale, NORM_BRANCH,
                [False, need_branch, affine, need_branch_bias], x_dtype, branch.dtype,
            )  # fmt: skip
        return (
            dx,
            d_branch if need_branch else None,
            d_weight.to(weight_dtype) if need_weight else None,
            d_bias.to(bias_dtype) if need_bias else None,
            d_branch_bias.to(branch_bias.dtype) if need_branch_bias else None,
            None,
            None,
            None,
        )
