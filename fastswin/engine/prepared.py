"""A model's weights as the forward pass reads them, and what kernels read of them, made once.

prepare.py makes them of a readable model. What depends on a kernel's form, packed weights and bias
tables, is made when a plan is bound (bind.py) and kept with the block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, Protocol

import torch

from fastswin.ops.attention_half.packing import pack_whole
from fastswin.ops.cluster_mlp.weights import PackedMlp, pack_weights
from fastswin.ops.swin_block.packing import PackedBlock, pack_block
from fastswin.ops.window_attention.geometry import expand_bias_table
from fastswin.ops.window_attention.packing import (
    pack_bias,
    pack_compact_bias,
    shorten_compact_bias,
)

Pair = tuple[int, int]

#: Largest |bias * log2(e)| stored in fp16; beyond it the bias table stays fp32.
FP16_BIAS_LIMIT = 1.0e4


class Linear(Protocol):
    """A linear layer ``weight [N, K]`` in the engine's dtype, ``bias [N]`` fp32 or None.

    ``library_bias`` is the bias in the weight's dtype, as the library's GEMM wants it.
    """

    @property
    def weight(self) -> torch.Tensor: ...
    @property
    def bias(self) -> torch.Tensor | None: ...
    @property
    def library_bias(self) -> torch.Tensor | None: ...


@dataclasses.dataclass(frozen=True)
class Affine:
    """A :class:`Linear` whose tensors are simply there."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    library_bias: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class Norm:
    """LayerNorm's affine, fp32 ``[C]`` each."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclasses.dataclass
class PreparedBlock:
    """One block. ``norm1`` and ``norm2`` are None where folded away (V1).

    ``number`` is its index in its stage. ``pad_qkv [3C]`` is the qkv of a padded token: the
    projection of zeros, so the *unfolded* bias. ``relative_bias [(2 Wh - 1) (2 Ww - 1), nH]`` is
    fp32; what is kept beside it are the packed tables of the shifts that are used, or one compact
    table of long windows.
    """

    number: int
    qkv: Linear
    pad_qkv: torch.Tensor | None
    relative_bias: torch.Tensor
    logit_scale: torch.Tensor | None
    head_scale: torch.Tensor | None
    scale: float
    proj: Linear
    fc1: Linear
    fc2: Linear
    norm1: Norm | None
    norm2: Norm | None
    shifted: bool
    window_size: Pair
    tables: dict[Pair, torch.Tensor] = dataclasses.field(default_factory=dict)
    compact_table: torch.Tensor | None = None
    whole: PackedBlock | None = None
    mlps: dict[int, PackedMlp] = dataclasses.field(default_factory=dict)
    half: torch.Tensor | None = None

    @property
    def bias(self) -> torch.Tensor:
        """Dense fp32 ``[nH, N, N]``, made anew: 20 MiB for 16 heads of a window of 24."""
        return expand_bias_table(self.relative_bias, self.window_size)

    def bias_table(self, shift_size: Pair, dtype: torch.dtype) -> torch.Tensor:
        """Bias + shift mask in the kernel's form for one shift (packing.py).

        fp16 for half precision: softmax does not see a constant in a row, so each row's largest
        value becomes 0, and what lies ``d`` below it is off by ``d 2**-12`` where its weight is
        ``2**-d``. V2's biases reach 16, where fp16 alone would be 0.8 % off.
        """
        if shift_size not in self.tables:
            bias = self.bias
            packed = pack_bias(bias, len(bias), self.window_size, shift_size, bias.device)
            if dtype in (torch.float16, torch.bfloat16):
                below = packed - packed.amax(-1, keepdim=True)
                finite = below[below.isfinite()]
                if finite.numel() == 0 or finite.min().item() > -FP16_BIAS_LIMIT:
                    packed = below.half()
            self.tables[shift_size] = packed
        return self.tables[shift_size]

    def attention_table(self, shift_size: Pair, dtype: torch.dtype, compact: bool) -> torch.Tensor:
        """What attention in a kernel of its own reads: a compact table, or :meth:`bias_table`.

        A compact one has 16 bits an entry in half precision, fp32 where a head's values lie further
        apart than those hold (packing.py).
        """
        if not compact:
            return self.bias_table(shift_size, dtype)
        if self.compact_table is None:
            table, short = pack_compact_bias(self.relative_bias, self.window_size), None
            if dtype in (torch.float16, torch.bfloat16):
                short = shorten_compact_bias(table)
            self.compact_table = table if short is None else short
        return self.compact_table

    def packed(self) -> PackedBlock:
        """Its weights as one kernel for a whole block reads them (ops/swin_block), made once."""
        if self.whole is None:
            qkv, proj, fc1, fc2 = (
                (x.weight, x.bias) for x in (self.qkv, self.proj, self.fc1, self.fc2)
            )
            norm1, norm2 = (
                None if n is None else (n.weight, n.bias) for n in (self.norm1, self.norm2)
            )
            self.whole = pack_block(qkv, proj, fc1, fc2, norm1, norm2)
        return self.whole

    def half_vectors(self) -> torch.Tensor:
        """What Hopper's kernel for the attention half reads beside weights, made once."""
        if self.half is None:
            norm = self.norm1
            self.half = pack_whole(
                self.qkv.weight, self.qkv.bias, self.proj.bias,
                None if norm is None else norm.weight, None if norm is None else norm.bias,
            )  # fmt: skip
        return self.half

    def packed_mlp(self, programs: int) -> PackedMlp:
        """Its MLP as clusters of so many programs read it (ops/cluster_mlp), made once."""
        if programs not in self.mlps:
            norm = None if self.norm2 is None else (self.norm2.weight, self.norm2.bias)
            fc1, fc2 = ((x.weight, x.bias) for x in (self.fc1, self.fc2))
            self.mlps[programs] = pack_weights(fc1, fc2, norm, programs)
        return self.mlps[programs]


@dataclasses.dataclass(frozen=True)
class PreparedMerging:
    """Patch merging; ``norm`` is None where folded into the reduction (V1)."""

    reduction: Linear
    norm: Norm | None


@dataclasses.dataclass
class Footprint:
    """Bytes of a model's weights on its device."""

    num_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class PreparedModel:
    """All weights of one model on one device in one dtype.

    ``offsets`` holds sums of biases that plans share (forward.bind).
    """

    patch_weight: torch.Tensor
    patch_bias: torch.Tensor
    patch_norm: Norm | None
    position_embedding: torch.Tensor | None
    stages: tuple[tuple[PreparedBlock, ...], ...]
    mergings: tuple[PreparedMerging, ...]
    norm: Norm
    head: Affine | None
    footprint: Footprint
    offsets: dict[Hashable, Any] = dataclasses.field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights on the device."""
        return self.footprint.num_bytes
