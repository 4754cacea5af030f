"""Blocks of a small stage: distinct weights in every block, rows with a mean."""

from __future__ import annotations

import dataclasses

import torch

from fastswin.ops import BlockWeights


def make_block(
    randn,
    C: int,
    heads: int,
    tokens: int,
    *,
    shifted: bool = False,
    dtype: torch.dtype = torch.float16,
    biases: bool = True,
) -> BlockWeights:
    """One block with a hidden layer of 4 C channels."""

    def vector(size: int) -> torch.Tensor | None:
        return randn(size, spread=0.5) if biases else None

    return BlockWeights(
        qkv_weight=randn(3 * C, C, dtype=dtype, spread=1.5 * C**-0.5),
        qkv_bias=vector(3 * C),
        bias=randn(heads, tokens, tokens) if biases else None,
        proj_weight=randn(C, C, dtype=dtype, spread=C**-0.5),
        proj_bias=vector(C),
        fc1_weight=randn(4 * C, C, dtype=dtype, spread=C**-0.5),
        fc1_bias=vector(4 * C),
        fc2_weight=randn(C, 4 * C, dtype=dtype, spread=(4 * C) ** -0.5),
        fc2_bias=vector(C),
        shifted=shifted,
    )


def in_dtype(block: BlockWeights, dtype: torch.dtype) -> BlockWeights:
    """The same block with every tensor in ``dtype`` (fp64: the oracle's)."""
    tensors = {
        field.name: value.to(dtype)
        for field in dataclasses.fields(block)
        if isinstance(value := getattr(block, field.name), torch.Tensor)
    }
    return dataclasses.replace(block, **tensors)
