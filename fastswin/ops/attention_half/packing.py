"""What the projections of the form without proj add, computed once per weight load.

LayerNorm without affine, inside the product instead of in front of it (``o`` a pending offset):

    norm(x + o) @ W.T + b = rstd * (x @ W.T + o @ W.T - mean * W.sum(1)) + b

so rows of x reach the tensor cores as they lie in memory, and their statistics are needed only
behind the product. Rounding: x and W are exact there, where a normalised row would be rounded.
"""

from __future__ import annotations

import torch


def pack_projection(
    weight: torch.Tensor, bias: torch.Tensor | None, offset: torch.Tensor | None
) -> torch.Tensor:
    """fp32 ``[3, 3C]``: bias, sums of the weight's rows, and its product with the offset.

    Args:
        weight: ``[3C, C]``, as the kernel multiplies it (rounded to its dtype).
        bias: ``[3C]`` or None.
        offset: ``[C]`` or None.
    """
    wide = weight.double()
    zero = wide.new_zeros(weight.shape[0])
    rows = (
        zero if bias is None else bias.double(),
        wide.sum(1),
        zero if offset is None else wide @ offset.double(),
    )
    return torch.stack(rows).float().contiguous()


def pack_whole(
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    proj_bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
) -> torch.Tensor:
    """fp32 ``[6, C]``: biases of q, k, v and proj, weight and bias of V2's norm (hopper_whole.py).

    Args:
        qkv_weight: ``[3C, C]``, for its size and device.
        qkv_bias: ``[3C]`` or None.
        proj_bias: ``[C]`` or None.
        norm_weight, norm_bias: ``[C]``, None of V1.
    """
    packed = qkv_weight.new_zeros(6, qkv_weight.shape[1], dtype=torch.float32)
    if qkv_bias is not None:
        packed[:3] = qkv_bias.view(3, -1)
    for row, vector in ((3, proj_bias), (4, norm_weight), (5, norm_bias)):
        if vector is not None:
            packed[row] = vector
    return packed
