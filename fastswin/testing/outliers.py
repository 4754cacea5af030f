"""Models with outliers of the kinds that break 8-bit ranges, and the function they had before.

    channel   g_c, b_c of every LayerNorm times ``factor``, column c of the next weight over it
    output    the same ``offset`` added to every channel that fc2 and merging write

Both change no answer of a V1 model in exact arithmetic: the next layer undoes the first, and the
next LayerNorm subtracts the second with the mean. The first is what an unfolded affine does to the
range of an activation, the second what a wide residual branch does to the range of an output.
"""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def add_outliers(model: Any, *, factor: float = 50.0, offset: float = 600.0, seed: int = 0) -> None:
    """Put outliers into a V1 model's weights, in place.

    Args:
        model: the readable Swin Transformer V1, its maps even where it merges (padding is no part
            of the equivalence).
        factor: of one channel of every LayerNorm of blocks and mergings.
        offset: added to the outputs of fc2 and merging; the residual stream carries their sum.
        seed: chooses the channels.

    Raises:
        ValueError: a V2 model.
    """
    if model.config.version != 1:
        raise ValueError(f"model must be version 1, got version {model.config.version}")
    generator = torch.Generator().manual_seed(seed)
    for stage in model.layers:
        for block in stage.blocks:
            _scale_channel(block.norm1, block.attn.qkv, factor, generator)
            _scale_channel(block.norm2, block.mlp.fc1, factor, generator)
            block.mlp.fc2.bias += offset
        if stage.downsample is not None:
            norm, reduction = stage.downsample.norm, stage.downsample.reduction
            _scale_channel(norm, reduction, factor, generator)
            # no bias of its own: the least shift of the norm's bias that the weight maps to offset
            weight = reduction.weight.double()
            shift = torch.linalg.lstsq(weight, torch.full_like(weight[:, :1], offset)).solution
            norm.bias += shift[:, 0].to(norm.bias.dtype)


def _scale_channel(norm: Any, linear: Any, factor: float, generator: torch.Generator) -> None:
    channel = int(torch.randint(len(norm.weight), (), generator=generator))
    norm.weight[channel] *= factor
    norm.bias[channel] *= factor
    linear.weight[:, channel] /= factor
