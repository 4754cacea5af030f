"""Bias tables of the engine: what half precision stores changes no probability beyond its own."""

from __future__ import annotations

import pytest
import torch
from engine_cases import tiny

from fastswin.engine.prepare import prepare
from fastswin.engine.prepared import FP16_BIAS_LIMIT
from fastswin.ops.window_attention.packing import LOG2_E

CPU = torch.device("cpu")


def block_of(version, dtype, largest=None):
    prepared = prepare(tiny(version), CPU, dtype)
    block = prepared.stages[0][1]
    generator = torch.Generator().manual_seed(4)
    values = torch.rand(block.relative_bias.shape, generator=generator) * (largest or 16.0)
    block.relative_bias.copy_(values)  # V2's lie between 0 and 16
    return block


def probabilities(table, tokens):
    """Of scores that are 0, with the table in fp64; only rows and keys that exist."""
    scores = table[:, :, :tokens, :tokens].double() / LOG2_E
    return scores.softmax(-1)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("shift", [(0, 0), (2, 1)], ids=["plain", "shifted"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_tables_keep_probabilities(version, shift, dtype):
    block = block_of(version, dtype)
    tokens = block.window_size[0] * block.window_size[1]
    table = block.bias_table(shift, dtype)
    assert table.dtype == torch.float16
    assert table[:, :, :tokens].amax(-1).eq(0).all()
    exact = probabilities(block_of(version, torch.float32).bias_table(shift, torch.float32), tokens)
    got = probabilities(table, tokens)
    rounded = (block.bias.half().double()[None] - block.bias.double()[None]).abs().max()
    assert rounded > 3e-3  # what fp16 alone loses near 16, and with it 0.4 % of a probability
    assert (got - exact).abs().max() < 2.0**-12 * 0.6
    assert torch.equal(got == 0, exact == 0)


def test_a_range_beyond_fp16_stays_fp32():
    block = block_of(1, torch.float16, largest=2 * FP16_BIAS_LIMIT)
    assert block.bias_table((0, 0), torch.float16).dtype == torch.float32


def test_weights_hold_no_dense_bias():
    """A window of 24 with 16 heads is 20 MiB of dense bias and 0.1 of table."""
    block = block_of(2, torch.float16)
    rows, columns = block.window_size
    assert block.relative_bias.shape == ((2 * rows - 1) * (2 * columns - 1), len(block.bias))
    kept = [v.shape for v in vars(block).values() if isinstance(v, torch.Tensor)]
    assert kept
    assert block.bias.shape not in kept
