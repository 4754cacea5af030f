"""What the MLP in clusters reads of a block, made once per load of its weights."""

from __future__ import annotations

import dataclasses

import torch

from fastswin._triton.tensor_copy import copyable
from fastswin.ops.cluster_mlp.config import ClusterMlpConfig
from fastswin.ops.cluster_mlp.packing import pack_mlp, pack_offset
from fastswin.ops.linear.vectors import bias_vector, row_sums

Vector = torch.Tensor | None
Norm = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class PackedMlp:
    """Weights in the stream's dtype, vectors fp32.

    Attributes:
        tiles: of fc1 and fc2, for as many programs as they were packed for (packing.py).
        fc1_sums: ``[4C]`` that V1's LayerNorm behind fc1 takes off; None in V2.
        fc1_bias, fc2_bias: ``[4C]`` and ``[C]``.
        norm: weight and bias ``[C]`` of V2's norm; None in V1, whose affine is folded.
    """

    tiles: torch.Tensor
    fc1_sums: Vector
    fc1_bias: torch.Tensor
    fc2_bias: torch.Tensor
    norm: Norm | None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that there are."""
        some = (self.tiles, self.fc1_sums, self.fc1_bias, self.fc2_bias, *(self.norm or ()))
        return tuple(t for t in some if t is not None)


def pack_weights(
    fc1: tuple[torch.Tensor, Vector],
    fc2: tuple[torch.Tensor, Vector],
    norm: Norm | None,
    programs: int,
) -> PackedMlp:
    """Weight and bias of both layers, a bias that is None as zeros; ``norm`` as V2 has it."""
    sums = row_sums(fc1[0]) if norm is None else None
    tiles = pack_mlp(fc1[0], fc2[0], programs)
    return PackedMlp(tiles, sums, bias_vector(*fc1), bias_vector(*fc2), norm)


def mlp_of_plain_weights(
    x: torch.Tensor,
    fc1: tuple[torch.Tensor, torch.Tensor],
    fc2: tuple[torch.Tensor, torch.Tensor],
    norm: Norm | None,
    offset: Vector,
    eps: float,
    out: Vector,
    config: ClusterMlpConfig,
    pdl: bool,
) -> torch.Tensor:
    """``ops.mlp`` by the MLP in clusters: weights are packed anew at each call, 16 C C values.

    Args:
        x, offset, eps, out, pdl: as ``ops.mlp`` has them.
        fc1, fc2: weight and bias.
        norm: V2's weight and bias, None in V1.
        config: legal tiles.
    """
    from fastswin.ops.cluster_mlp.launch import cluster_mlp_fwd

    result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    C = x.shape[-1]
    rows = copyable(x).view(-1, C)
    to = copyable(result).view(-1, C)
    packed = pack_weights(fc1, fc2, norm, config.programs)
    packed_offset, fc2_bias = None, packed.fc2_bias
    if offset is not None and norm is None:
        packed_offset, fc2_bias = pack_offset(offset.float(), fc2_bias, x.dtype)
    elif offset is not None:  # V2's norm stands between fc2's bias and the residual
        rows = rows + offset.to(x.dtype)
    cluster_mlp_fwd(
        rows, packed.tiles, packed.fc1_sums, packed.fc1_bias, fc2_bias, eps, to, config, pdl,
        post_norm=norm if norm is None else (norm[0].float(), norm[1].float()),
        offset=packed_offset,
    )  # fmt: skip
    return result if to.data_ptr() == result.data_ptr() else result.copy_(to.view_as(result))
