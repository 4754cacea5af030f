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
