"""One backward call: what it reads, which gradients it owes, and where they go."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fastswin.ops.window_attention.launch import (
    AttentionShape,
    Dropout,
    Strides,
    dropout_arguments,
    products_form,
)
from fastswin.ops.window_attention.packing import LOG2_E


@dataclasses.dataclass(frozen=True)
class Needs:
    """Which gradients are asked for.

    ``pad`` is the sum of the padded tokens' dqkv, ``qkv_sum`` that of all tokens'.
    """

    q: bool
    k: bool
    v: bool
    bias: bool
    logit_scale: bool
    pad: bool
    qkv_sum: bool

    @property
    def any(self) -> bool:
        return any(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class BackwardProblem:
    """Arguments of the backward kernels.

    Attributes:
        shape: of the problem.
        q, k, v: inputs; pointers into one qkv in image order.
        grad: upstream gradient, laid out like the output.
        out, row_stats: what the forward gave; only the tiled form reads them.
        bias, mask, head_scale: packed (packing.py).
        pad: ``[3C]`` qkv of a padded token.
        scale: V1's factor.
        tf32: whether fp32 products run on tensor cores.
        dropout: None without.
        needs: which gradients are computed.
        dq, dk, dv: outputs, written only where needed.
        strides: (image, row, head) of q, k, v, grad, and of the three outputs.
    """

    shape: AttentionShape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor
    out: torch.Tensor | None
    row_stats: torch.Tensor | None
    bias: torch.Tensor
    mask: torch.Tensor | None
    head_scale: torch.Tensor | None
    pad: torch.Tensor | None
    scale: float
    tf32: bool
    dropout: Dropout | None
    needs: Needs
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    strides: list[Strides]

    @property
    def constants(self) -> dict[str, Any]:
        return self.shape.constants(self.bias, products_form(self.tf32), self.strides) | {
            "COSINE": self.head_scale is not None,
            "HAS_MASK": self.mask is not None,
            "DROPOUT": self.dropout is not None,
        }

    @property
    def tables(self) -> tuple[Any, ...]:
        """Arguments that every kernel takes in this order: bias to the dropout's factor."""
        bias = self.bias
        seed, threshold, factor = dropout_arguments(self.dropout, bias)
        return (
            bias,
            bias if self.mask is None else self.mask,
            bias if self.head_scale is None else self.head_scale,
            bias if self.pad is None else self.pad,
            seed, self.scale * LOG2_E, self.scale, threshold, factor,
        )  # fmt: skip

    @property
    def extents(self) -> tuple[int, ...]:
        """Map, grid of windows and number of masks."""
        masks = 1 if self.mask is None else self.mask.shape[0]
        return (*self.shape.map_size, *self.shape.grid_size, masks)

    def new_padding_gradient(self) -> torch.Tensor:
        """fp32 ``[B, slots, 2C]``: dk and dv of every padded token (its dq is 0); or a stand-in."""
        if not self.needs.pad:
            return self.grad
        shape = self.shape
        images = shape.windows // (shape.grid_size[0] * shape.grid_size[1])
        width = 2 * shape.heads * shape.head_dim
        return torch.empty(
            images, shape.padding_slots, width, dtype=torch.float32, device=self.grad.device
        )


@dataclasses.dataclass(frozen=True)
class Partials:
    """First stage of the sums, fp32, each written once per program: no atomics.

    Attributes:
        bias: ``[runs, nH, >= N, >= N]``.
        logit_scale: ``[..., nH, ...]`` with the head on axis 1.
        pad: ``[B, slots, 2C]``.
        qkv: ``[runs, 3, nH, D]``.
    """

    bias: torch.Tensor | None
    logit_scale: torch.Tensor | None
    pad: torch.Tensor | None
    qkv: torch.Tensor | None = None


def flatten_strides(strides: list[Strides]) -> list[int]:
    return [s for triple in strides for s in triple]
