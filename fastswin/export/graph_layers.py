"""Layers of the exported graph: the fewest standard operators that say what a layer does.

Products are ``x @ weight [K, N]`` with the transposed weight stored, so that no Transpose of a
weight is left in the file or to a runtime's folding pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def buffer(tensor: torch.Tensor) -> nn.Buffer:
    """A constant of the graph, detached and contiguous."""
    return nn.Buffer(tensor.detach().contiguous())


def folded(
    weight: torch.Tensor, bias: torch.Tensor | None, norm: nn.LayerNorm | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight ``[N, K]`` and bias ``[N]`` that act on a norm's output without its affine."""
    if norm is None:
        return weight, bias
    shift = weight @ norm.bias
    return weight * norm.weight, shift if bias is None else bias + shift


class GraphLinear(nn.Module):
    """``x @ weight + bias``: ``[..., K] -> [..., N]``, one MatMul and one Add."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scale_rows: torch.Tensor | None = None,
    ) -> None:
        """Take a layer's weight ``[N, K]``; ``scale_rows [N]`` multiplies its outputs."""
        super().__init__()
        if scale_rows is not None:
            weight = weight * scale_rows[:, None]
            bias = None if bias is None else bias * scale_rows
        self.weight = buffer(weight.t())
        self.bias = None if bias is None else buffer(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.matmul(x, self.weight)
        return y if self.bias is None else y + self.bias


class GraphNorm(nn.Module):
    """LayerNorm over channels as one operator.

    ``LayerNormalization`` computes mean and variance in fp32 also for fp16 (``stash_type`` 1).
    """

    def __init__(self, norm: nn.Module, bare: bool = False) -> None:
        """Take a LayerNorm; ``bare`` leaves its affine to the layer behind it (:func:`folded`)."""
        super().__init__()
        assert isinstance(norm, nn.LayerNorm)
        weight: torch.Tensor = norm.weight
        bias: torch.Tensor = norm.bias
        if bare:
            weight, bias = torch.ones_like(weight), torch.zeros_like(bias)
        self.weight, self.bias, self.eps = buffer(weight), buffer(bias), norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


class GraphMlp(nn.Module):
    """``fc2(gelu(fc1(x)))`` with the exact GELU."""

    def __init__(
        self, fc1: nn.Linear, fc2: nn.Linear, fold_norm: nn.LayerNorm | None = None
    ) -> None:
        super().__init__()
        self.fc1 = GraphLinear(*folded(fc1.weight, fc1.bias, fold_norm))
        self.fc2 = GraphLinear(fc2.weight, fc2.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class GraphPatchEmbed(nn.Module):
    """Images ``[B, 3, h, w]`` to tokens ``[B, H * W, C]`` in image order."""

    def __init__(self, patch_embed: nn.Module, position: torch.Tensor | None) -> None:
        super().__init__()
        proj = patch_embed.proj
        assert isinstance(proj, nn.Conv2d)
        self.weight = buffer(proj.weight)
        self.bias = None if proj.bias is None else buffer(proj.bias)
        norm = patch_embed.norm
        self.norm = GraphNorm(norm) if isinstance(norm, nn.LayerNorm) else nn.Identity()
        self.position = None if position is None else buffer(position)

    def map(self, images: torch.Tensor) -> torch.Tensor:
        """Tokens as a map ``[B, H, W, C]``, without the position embedding."""
        x = F.conv2d(images, self.weight, self.bias, stride=self.weight.shape[-1])
        return self.norm(x.permute(0, 2, 3, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(images, self.weight, self.bias, stride=self.weight.shape[-1])
        x = self.norm(x.flatten(2).transpose(1, 2))
        return x if self.position is None else x + self.position
