"""A block's weights in the form in which a cluster's programs read them, once per weight load."""

from __future__ import annotations

import dataclasses

import torch

from fastswin._triton.tensor_copy import copyable
from fastswin.ops.linear.vectors import bias_vector
from fastswin.ops.swin_block.config import HEAD_DIM

Vector = torch.Tensor | None
Norm = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class PackedBlock:
    """Weights in the stream's dtype, vectors fp32.

    Attributes:
        heads: ``[4C, C]``, of each head its 32 rows of q, k and v and the rows of proj's 32
            columns: one copy brings what a program needs of all four for 32 columns of its rows.
        qkv_bias, proj_bias: ``[3C]``, ``[C]``.
        fc1, fc2: ``[4C, C]``, ``[C, 4C]``, with their biases.
        norm1, norm2: weight and bias ``[C]`` of V2's norms; None in V1, whose affines are folded.
    """

    heads: torch.Tensor
    qkv_bias: torch.Tensor
    proj_bias: torch.Tensor
    fc1: torch.Tensor
    fc1_bias: torch.Tensor
    fc2: torch.Tensor
    fc2_bias: torch.Tensor
    norm1: Norm | None
    norm2: Norm | None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that there are."""
        plain = (self.heads, self.qkv_bias, self.proj_bias, self.fc1, self.fc1_bias, self.fc2,
                 self.fc2_bias)  # fmt: skip
        return (*plain, *(self.norm1 or ()), *(self.norm2 or ()))


def pack_block(
    qkv: tuple[torch.Tensor, Vector],
    proj: tuple[torch.Tensor, Vector],
    fc1: tuple[torch.Tensor, Vector],
    fc2: tuple[torch.Tensor, Vector],
    norm1: Norm | None = None,
    norm2: Norm | None = None,
) -> PackedBlock:
    """Weights and biases of a block's layers; a bias that is None becomes zeros.

    fc1's and fc2's weights are kept as they are where the tensor copy engine can read them.
    """

    C = proj[0].shape[0]
    rows = torch.cat((qkv[0], proj[0])).view(4, C // HEAD_DIM, HEAD_DIM, C)
    return PackedBlock(
        rows.transpose(0, 1).reshape(4 * C, C).contiguous(), bias_vector(*qkv), bias_vector(*proj),
        copyable(fc1[0]), bias_vector(*fc1), copyable(fc2[0]), bias_vector(*fc2), norm1, norm2,
    )  # fmt: skip
