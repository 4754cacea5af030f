"""What the streamed MLP reads of a block, made once per load of its weights.

biases, V2's norm [C]   ->   vectors [P, values] fp32: half of fc1's bias, fc2's, the norm's
"""

from __future__ import annotations

import dataclasses

import torch

from fastswin._triton.tensor_copy import copyable
from fastswin.ops.linear.vectors import bias_vector
from fastswin.ops.streamed_mlp.config import StreamedMlpConfig
from fastswin.ops.streamed_mlp.packing import pack_chunks

Vector = torch.Tensor | None
Norm = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class StreamedMlp:
    """Weights in the stream's dtype, vectors fp32.

    Attributes:
        chunks: ``[P * 2 steps * C, 64]`` (packing.py), P programs that share the hidden units.
        vectors: ``[P, values]``: half of fc1's bias, fc2's bias, V2's norm weight and bias.
        post_norm: whether V2's norm is among them; V1's affine is folded into fc1.
    """

    chunks: torch.Tensor
    vectors: torch.Tensor
    post_norm: bool

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that there are."""
        return self.chunks, self.vectors


def pack_streamed_mlp(
    fc1: tuple[torch.Tensor, Vector],
    fc2: tuple[torch.Tensor, Vector],
    norm: Norm | None,
    programs: int,
) -> StreamedMlp:
    """Weight and bias of both layers, a bias that is None as zeros; ``norm`` as V2 has it."""
    chunks = pack_chunks(fc1[0], fc2[0], programs)
    biases = bias_vector(*fc1).view(programs, -1) * 0.5
    behind = [v.float() for v in (bias_vector(*fc2), *(norm or ()))]
    vectors = torch.cat([biases, *(v.expand(programs, -1) for v in behind)], 1).contiguous()
    return StreamedMlp(chunks, vectors, norm is not None)


def mlp_of_plain_weights(
    x: torch.Tensor,
    fc1: tuple[torch.Tensor, torch.Tensor],
    fc2: tuple[torch.Tensor, torch.Tensor],
    norm: Norm | None,
    offset: Vector,
    eps: float,
    out: Vector,
    config: StreamedMlpConfig,
    pdl: bool,
) -> torch.Tensor:
    """``ops.mlp`` by the streamed MLP: weights are packed anew at each call, 16 C C values.

    Args:
        x, offset, eps, out, pdl: as ``ops.mlp`` has them.
        fc1, fc2: weight and bias.
        norm: V2's weight and bias, None in V1.
        config: legal tiles.
    """
    from fastswin.ops.streamed_mlp.launch import streamed_mlp_fwd

    result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    C = x.shape[-1]
    to = copyable(result).view(-1, C)
    packed = pack_streamed_mlp(fc1, fc2, norm, config.programs)
    streamed_mlp_fwd(copyable(x).view(-1, C), packed, eps, to, config, offset, pdl)
    return result if to.data_ptr() == result.data_ptr() else result.copy_(to.view_as(result))
