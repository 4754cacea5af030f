"""fp32 vectors that kernels read beside a weight, made once per load of it."""

from __future__ import annotations

import torch


def row_sums(weight: torch.Tensor) -> torch.Tensor:
    """``[N]`` of ``weight [N, K]`` as it is stored, which a LayerNorm behind its product needs."""
    return weight.double().sum(1).float()


def bias_vector(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``[N]``: the bias of ``weight [N, K]``, zeros where it is None."""
    if bias is None:
        return torch.zeros(len(weight), device=weight.device)
    return bias.float().contiguous()
