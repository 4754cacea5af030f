"""Schemas, fake kernels and dispatch of the merging gather with gradients; imports no Triton.

``norm`` False gathers only. An output that a call does not ask for is an empty tensor of no
elements. Gradients: autograd.py.
"""

from __future__ import annotations

import torch

Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_TAGS = (torch.Tag.pt2_compliant_tag,)

torch.library.define(
    "fastswin::gather_layer_norm_fwd",
    "(Tensor x, Tensor? weight, Tensor? bias, float eps, bool norm, ScalarType out_dtype)"
    " -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "fastswin::gather_layer_norm_bwd",
    "(Tensor d_out, Tensor? x, Tensor? mean, Tensor? rstd, Tensor? weight, SymInt height, "
    "SymInt width, bool[2] needs, ScalarType x_dtype) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


@torch.library.impl("fastswin::gather_layer_norm_fwd", "default")
def _fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    norm: bool,
    out_dtype: torch.dtype,
) -> Tensors3:
    from fastswin.ops.patch_merging.forward import gather_layer_norm_fwd

    return gather_layer_norm_fwd(x, weight, bias, eps, norm, out_dtype)


@torch.library.register_fake("fastswin::gather_layer_norm_fwd")
def _fwd_fake(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    norm: bool,
    out_dtype: torch.dtype,
) -> Tensors3:
    B, H, W, C = x.shape
    merged = (B, (H + 1) // 2, (W + 1) // 2)
    rows = merged if norm else (0,)
    return (
        x.new_empty((*merged, 4 * C), dtype=out_dtype),
        x.new_empty(rows, dtype=torch.float32),
        x.new_empty(rows, dtype=torch.float32),
    )


@torch.library.impl("fastswin::gather_layer_norm_bwd", "default")
def _bwd(
    d_out: torch.Tensor,
    x: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
    weight: torch.Tensor | None,
    height: int,
    width: int,
    needs: list[bool],
    x_dtype: torch.dtype,
) -> Tensors3:
    from fastswin.ops.patch_merging.backward import gather_layer_norm_bwd

    return gather_layer_norm_bwd(d_out, x, mean, rstd, weight, height, width, needs, x_dtype)


@torch.library.register_fake("fastswin::gather_layer_norm_bwd")
def _bwd_fake(
    d_out: torch.Tensor,
    x: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
    weight: torch.Tensor | None,
    height: int,
    width: int,
    needs: list[bool],
    x_dtype: torch.dtype,
) -> Tensors3:
    B, K = d_out.shape[0], d_out.shape[3]
    return (
        d_out.new_empty((B, height, width, K // 4) if needs[0] else (0,), dtype=x_dtype),
        d_out.new_empty((K,) if needs[1] else (0,), dtype=torch.float32),
        d_out.new_empty((K,) if needs[1] else (0,), dtype=torch.float32),
    )


gather_layer_norm_fwd = torch.ops.fastswin.gather_layer_norm_fwd
gather_layer_norm_bwd = torch.ops.fastswin.gather_layer_norm_bwd
