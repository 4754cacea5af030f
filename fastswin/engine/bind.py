"""A plan bound to weights: the biases that its readers add, and its packed bias tables.

Where the library's GEMM accumulates onto the residual stream, that product has no room for a bias,
so the stream is stored without the biases pending so far and every reader adds their sum, a
constant ``[C]`` vector (``BlockOffsets``); exact, and free of traffic. fc2 of few rows leaves to
the next reader its product itself (``Unjoined``) or the stream's statistics (``RowStats``).
"""

from __future__ import annotations

import dataclasses

import torch

from fastswin.engine.precision import Precision
from fastswin.engine.prepared import PreparedBlock, PreparedModel
from fastswin.engine.stage_plan import ModelPlan, StagePlan
from fastswin.ops.attention_half.hopper_config import HopperWholeConfig
from fastswin.ops.attention_half.packing import pack_projection
from fastswin.ops.cluster_mlp.config import ClusterMlpConfig
from fastswin.ops.linear.vectors import row_sums

Offset = torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class BlockOffsets:
    """Pending biases ``[C]`` that the two readers of one block add; None where there are none.

    ``qkv_vectors`` are what a fused attention of heads adds behind its projections
    (ops/attention_half/packing.py), ``qkv_sums [3C]`` and ``fc1_sums [hidden]`` what a LayerNorm
    behind qkv's and fc1's product takes off (ops/linear/one_shot.py); None without it.
    """

    norm1: Offset
    norm2: Offset
    qkv_vectors: torch.Tensor | None = None
    qkv_sums: torch.Tensor | None = None
    fc1_sums: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Unjoined:
    """fc2's product that the stream lacks until the next reader adds it (ops/split_k).

    Attributes:
        partials: ``[splits, B, H, W, C]`` fp32.
        bias: ``[C]`` of the product, or None.
    """

    partials: torch.Tensor
    bias: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class RowStats:
    """Statistics of the stream's rows as the product that wrote them has left them.

    Attributes:
        values: fp32 ``[2, parts, rows]`` (ops/linear/stats.py).
    """

    values: torch.Tensor


#: What a block or a merging leaves to the block behind it, beside the stream.
Left = Unjoined | RowStats | None


@dataclasses.dataclass
class BoundPlan:
    """A plan and the tensors that depend on it, ready to run.

    ``compiled`` says that its kernels have been compiled ahead of their first launch.
    """

    plan: ModelPlan
    offsets: tuple[tuple[BlockOffsets, ...], ...]
    stage_end: tuple[Offset, ...]
    compiled: bool = False


def bind(plan: ModelPlan, weights: PreparedModel, precision: Precision) -> BoundPlan:
    """Sum the pending biases of every block under a plan, and pack its bias tables.

    Both are kept with the weights, not with the plan: a captured graph reads them for as long as
    it lives, and plans are dropped before that.
    """
    offsets, ends = [], []
    for stage, blocks in zip(plan.stages, weights.stages, strict=True):
        key = (
            stage.stage, stage.qkv, stage.attention, stage.proj, stage.mlp, stage.norm2,
            stage.formats,
        )  # fmt: skip
        if key not in weights.offsets:
            weights.offsets[key] = _pending_biases(stage, blocks)
        rows, end = weights.offsets[key]
        offsets.append(rows)
        ends.append(end)
        if stage.attention in ("triton", "fused", "block"):
            for block in blocks:
                shift = stage.shift_size if block.shifted else (0, 0)
                block.attention_table(shift, precision.dtype, stage.compact_bias)
                if stage.attention == "block":
                    block.packed()
        if isinstance(stage.launch.get("attention"), HopperWholeConfig):
            for block in blocks:
                block.half_vectors()
        tiles = stage.launch.get("mlp")
        if isinstance(tiles, ClusterMlpConfig):
            for block in blocks:
                block.packed_mlp(tiles.programs)
    return BoundPlan(plan, tuple(offsets), tuple(ends))


def _pending_biases(
    stage: StagePlan, blocks: tuple[PreparedBlock, ...]
) -> tuple[tuple[BlockOffsets, ...], Offset]:
    """What the readers of each block of a stage add, and what is pending at its end."""
    pending: Offset = None
    rows = []
    for number, block in enumerate(blocks):
        proj, mlp = stage.endings(number)
        norm1, vectors = pending, None
        if proj == "inside":  # adds the offset to the residual it writes back
            pending = None
        elif _defers_bias(proj, block):
            pending = _add(pending, block.proj.bias)
        if stage.attention == "fused" and proj != "inside":
            vectors = pack_projection(block.qkv.weight, block.qkv.bias, norm1)
        qkv_sums = fc1_sums = None
        wide = stage.formats is None or not stage.formats.blocks[number].fc1.quantized
        if stage.qkv == "clusters" and block.norm1 is None:
            qkv_sums = row_sums(block.qkv.weight)
        if stage.norm2 == "behind" and block.norm2 is None and wide:
            fc1_sums = row_sums(block.fc1.weight)
        rows.append(BlockOffsets(norm1, pending, vectors, qkv_sums, fc1_sums))
        if mlp == "fused":  # adds the offset to the residual it writes back
            pending = None
        elif _defers_bias(mlp, block):
            pending = _add(pending, block.fc2.bias)
    return tuple(rows), pending


def in_place(implementation: str) -> bool:
    """Whether a layer's last product is the library's, accumulating onto the stream."""
    return implementation in ("library", "unfused")


def _defers_bias(implementation: str, block: PreparedBlock) -> bool:
    """V1's in-place library products leave their bias pending; V2 normalises the branch first."""
    return in_place(implementation) and block.norm1 is None


def _add(pending: Offset, bias: Offset) -> Offset:
    if bias is None:
        return pending
    return bias if pending is None else pending + bias
