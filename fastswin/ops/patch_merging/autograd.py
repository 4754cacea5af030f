"""Autograd of the merging gather: the map itself and two fp32 numbers a merged row are kept.

    n = LN(gather(x));  dx = scatter(LN'(dn))      every token has one place in one merged row
    y = n W^T           dW = dy^T n                n is made again, as large as the map

Without the norm nothing is kept. Not differentiable twice: the second backward raises;
``impl="reference"`` is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from fastswin.ops.patch_merging import register


class GatherLayerNorm(torch.autograd.Function):
    """``(x [B, H, W, C], weight, bias, eps, norm, out_dtype) -> [B, H/2, W/2, 4C]``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        norm: bool,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        out, mean, rstd = register.gather_layer_norm_fwd(x, weight, bias, eps, norm, out_dtype)
        ctx.save_for_backward(*((x, mean, rstd, weight) if norm else (None,) * 4))
        ctx.map_size = x.shape[1:3]
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias)]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple:
        x, mean, rstd, weight = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dx, d_weight, d_bias = register.gather_layer_norm_bwd(
            d_out, x, mean, rstd, weight, *ctx.map_size, [need_x, need_weight or need_bias],
            x_dtype,
        )  # fmt: skip
        return (
            dx if need_x else None,
            d_weight.to(weight_dtype) if need_weight else None,
            d_bias.to(bias_dtype) if need_bias else None,
            None,
            None,
            None,
        )


class GatherLayerNormLinear(torch.autograd.Function):
    """``(x, weight, bias, linear_weight [K, 4C], eps, out_dtype) -> [B, H/2, W/2, K]``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        linear_weight: torch.Tensor,
        eps: float,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        rows, mean, rstd = register.gather_layer_norm_fwd(x, weight, bias, eps, True, out_dtype)
        product_weight = linear_weight.to(out_dtype)
        ctx.save_for_backward(x, mean, rstd, weight, bias, product_weight)
        ctx.eps = eps
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias, linear_weight)]
        return F.linear(rows, product_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple:
        x, mean, rstd, weight, bias, product_weight = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype, linear_dtype = ctx.dtypes
        need_x, need_weight, need_bias, need_linear = ctx.needs_input_grad[:4]
        d_linear = dx = d_weight = d_bias = None
        if need_linear:
            rows, _, _ = register.gather_layer_norm_fwd(
                x, weight, bias, ctx.eps, True, product_weight.dtype
            )
            d_linear = dy.flatten(0, 2).t().mm(rows.flatten(0, 2)).to(linear_dtype)
            del rows
        if need_x or need_weight or need_bias:
            dx, d_weight, d_bias = register.gather_layer_norm_bwd(
                dy @ product_weight, x, mean, rstd, weight, *x.shape[1:3],
                [need_x, need_weight or need_bias], x_dtype,
            )  # fmt: skip
        return (
            dx if need_x else None,
            d_weight.to(weight_dtype) if d_weight is not None and need_weight else None,
            d_bias.to(bias_dtype) if d_bias is not None and need_bias else None,
            d_linear,
            None,
            None,
        )
