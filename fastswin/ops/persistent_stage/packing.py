"""Weights of a stage's blocks as a table of addresses, made once per weight load.

A kernel that walks over blocks needs their tensors by number. Copies stacked into one would double
the weights' memory; a table of addresses is 88 bytes a block. It holds no references: whoever keeps
it (:class:`PackedStage`) keeps the tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

#: Columns of the table: qkv's weight and bias, packed bias table, whether the block is shifted,
#: proj's weight and bias, fc1's weight, bias and row sums, fc2's weight and bias.
COLUMNS = 11

#: Least number of a table in fp16, log2 of a weight of 0.
LOWEST = -6.0e4

Vector = torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class BlockWeights:
    """One V1 block; matrices in the stream's dtype, vectors fp32 or None.

    Both LayerNorms' affine is folded into qkv and fc1.

    Attributes:
        qkv_weight, qkv_bias: ``[3C, C]`` and ``[3C]``.
        bias: dense relative position bias ``[nH, N, N]``, or None.
        proj_weight, proj_bias: ``[C, C]`` and ``[C]``.
        fc1_weight, fc1_bias: ``[hidden, C]`` and ``[hidden]``.
        fc2_weight, fc2_bias: ``[C, hidden]`` and ``[C]``.
        shifted: whether its windows are.
    """

    qkv_weight: torch.Tensor
    qkv_bias: Vector
    bias: Vector
    proj_weight: torch.Tensor
    proj_bias: Vector
    fc1_weight: torch.Tensor
    fc1_bias: Vector
    fc2_weight: torch.Tensor
    fc2_bias: Vector
    shifted: bool = False

    def matrices(self) -> dict[str, tuple[torch.Tensor, Vector]]:
        """Weight and bias by layer, in the order of the forward pass."""
        return {
            "qkv": (self.qkv_weight, self.qkv_bias),
            "proj": (self.proj_weight, self.proj_bias),
            "fc1": (self.fc1_weight, self.fc1_bias),
            "fc2": (self.fc2_weight, self.fc2_bias),
        }


@dataclasses.dataclass(frozen=True, eq=False)
class PackedStage:
    """Addresses ``[depth, COLUMNS]`` int64 on the device, and everything they point to.

    Attributes:
        addresses: the table.
        hidden: channels of the MLP.
        table: packed bias table of the first block; all are fp16.
        tensors: what the addresses are of.
    """

    addresses: torch.Tensor
    hidden: int
    table: torch.Tensor
    tensors: tuple[torch.Tensor, ...]

    @property
    def depth(self) -> int:
        """Blocks of the stage."""
        return self.addresses.shape[0]


def half_table(table: torch.Tensor) -> torch.Tensor:
    """A packed bias table in fp16: each row below its largest value, of which softmax sees nothing.

    Weights of what lies further below than fp16 reaches, and of padded keys, are 0 all the same.
    """
    if table.dtype == torch.float16:
        return table
    below = table - table.amax(-1, keepdim=True)
    return below.clamp(min=LOWEST).half()


def pack_stage(blocks: Sequence[BlockWeights], tables: Sequence[torch.Tensor]) -> PackedStage:
    """Note where the tensors of every block lie.

    Args:
        blocks: in order; their device gets the table.
        tables: packed bias tables of the blocks (ops/window_attention/packing.py), fp16 or to be
            made so: with those of fp32 the kernel read outside its memory (H200, Triton 3.6).

    Raises:
        ValueError: a tensor does not begin at a multiple of 16 bytes.
    """
    tables = [half_table(table) for table in tables]
    kept: list[torch.Tensor] = []

    def address(tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        if tensor.data_ptr() % 16:
            raise ValueError("weights must begin at multiples of 16 bytes")
        kept.append(tensor)
        return tensor.data_ptr()

    rows = []
    for block, table in zip(blocks, tables, strict=True):
        pointers = {}
        for name, (weight, bias) in block.matrices().items():
            if bias is None:
                bias = torch.zeros(weight.shape[0], device=weight.device)
            pointers[name] = (address(weight), address(bias.float()))
        sums = address(block.fc1_weight.double().sum(1).float())
        attention = (*pointers["qkv"], address(table), int(block.shifted), *pointers["proj"])
        rows.append((*attention, *pointers["fc1"], sums, *pointers["fc2"]))
    device = blocks[0].qkv_weight.device
    return PackedStage(
        torch.tensor(rows, dtype=torch.int64).to(device),
        blocks[0].fc1_weight.shape[0],
        tables[0],
        tuple(kept),
    )
