"""Load-time work: a model's weights in the form the forward pass reads.

Once per load: LayerNorm's affine is folded into the linear layer behind it (V1), the relative
position bias becomes dense, V2's bias MLP and temperature are evaluated, everything is cast and
made contiguous on the device. Biases and norms stay fp32; matrices take the engine's dtype.

    linear(norm(x) * g + b) = (norm(x)) @ (W * g).T + (W @ b + bias)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, Protocol, cast

import torch

from fastswin.models.swin import (
    PatchMerging,
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerStage,
)
from fastswin.ops.attention_half.packing import pack_whole
from fastswin.ops.cluster_mlp.weights import PackedMlp, pack_weights
from fastswin.ops.swin_block.packing import PackedBlock, pack_block
from fastswin.ops.window_attention.geometry import expand_bias_table
from fastswin.ops.window_attention.packing import pack_bias, pack_head_scale

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
    fp32; what is kept dense are the packed tables of the shifts that are used.
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


def prepare(
    model: SwinTransformer, device: torch.device, dtype: torch.dtype, *, tf32: bool = False
) -> PreparedModel:
    """Snapshot of a readable model's weights in the engine's form; the model is not modified.

    With ``tf32`` matrices are rounded to TF32: tensor cores would cut them off, which loses twice
    as much on average and makes every product smaller.
    """
    return build(model, Builder(device, dtype, tf32=tf32))


@torch.no_grad()
def build(model: SwinTransformer, builder: Builder) -> PreparedModel:
    """The snapshot that a builder makes."""
    dtype = builder.dtype
    config = model.config
    conv, patch_norm = model.patch_embed.proj, model.patch_embed.norm
    assert conv.bias is not None  # PatchEmbed always has one
    stages, mergings = [], []
    for i, layer in enumerate(cast("list[SwinTransformerStage]", model.layers)):
        blocks = cast("list[SwinTransformerBlock]", layer.blocks)
        stages.append(
            tuple(
                builder.block(block, config.version, f"layers.{i}.blocks", j)
                for j, block in enumerate(blocks)
            )
        )
        if layer.downsample is not None:
            mergings.append(builder.merging(layer.downsample, f"layers.{i}.downsample"))
    head = None
    if isinstance(model.head, torch.nn.Linear):  # Identity without classes
        head = builder.affine(model.head.weight, model.head.bias)
    position = None
    if config.absolute_position_embedding:
        position = builder.tensor(model.absolute_pos_embed, dtype)
    return PreparedModel(
        patch_weight=builder.tensor(conv.weight, dtype),
        patch_bias=builder.tensor(conv.bias, torch.float32),
        patch_norm=builder.norm(patch_norm) if isinstance(patch_norm, torch.nn.LayerNorm) else None,
        position_embedding=position,
        stages=tuple(stages),
        mergings=tuple(mergings),
        norm=builder.norm(model.norm),
        head=head,
        footprint=builder.footprint,
    )


def round_to_tf32(matrix: torch.Tensor) -> torch.Tensor:
    """fp32 numbers at their nearest of 10 bits behind the point, in fp32."""
    bits = matrix.view(torch.int32)
    return ((bits + (1 << 12)) & -(1 << 13)).view(torch.float32)


class Builder:
    """Casts, folds and counts."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, tf32: bool = False) -> None:
        self.device, self.dtype, self.footprint = device, dtype, Footprint()
        self.tf32 = tf32

    def tensor(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous copy that shares no memory with the source."""
        copy = torch.empty(source.shape, device=self.device, dtype=dtype)
        self.footprint.num_bytes += copy.numel() * copy.element_size()
        return copy.copy_(source)

    def norm(self, module: torch.nn.LayerNorm) -> Norm:
        return Norm(
            self.tensor(module.weight, torch.float32), self.tensor(module.bias, torch.float32)
        )

    def affine(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        fold: torch.nn.LayerNorm | None = None,
    ) -> Affine:
        """A linear layer, with a preceding LayerNorm's affine folded in (fp64, on the device)."""
        if fold is not None:
            wide = weight.to(self.device).double()
            shift = wide @ fold.bias.to(self.device).double()
            bias = shift if bias is None else bias.to(self.device).double() + shift
            weight = wide * fold.weight.to(self.device).double()
        matrix = self.tensor(weight, self.dtype)
        if self.tf32:
            matrix = round_to_tf32(matrix)
        return Affine(
            matrix,
            None if bias is None else self.tensor(bias, torch.float32),
            None if bias is None else self.tensor(bias, self.dtype),
        )

    def linear(
        self,
        name: str,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        fold: torch.nn.LayerNorm | None = None,
    ) -> Linear:
        """The layer of a name, such as ``layers.0.blocks.1.mlp.fc2``."""
        return self.affine(weight, bias, fold)

    def block(
        self, block: SwinTransformerBlock, version: int, stage: str, number: int
    ) -> PreparedBlock:
        at = f"{stage}.{number}"
        attn, mlp = block.attn, block.mlp
        norm_first = version == 1
        qkv_bias = attn.qkv_bias
        norm1, norm2 = (block.norm1, block.norm2) if norm_first else (None, None)
        position = attn.position_bias()
        logit_scale = position.get("logit_scale")
        if logit_scale is not None:
            logit_scale = self.tensor(logit_scale.flatten(), torch.float32)
        head_dim = attn.qkv.weight.shape[1] // attn.num_heads
        return PreparedBlock(
            number=number,
            qkv=self.linear(f"{at}.attn.qkv", attn.qkv.weight, qkv_bias, norm1),
            pad_qkv=None if qkv_bias is None else self.tensor(qkv_bias, self.dtype),
            relative_bias=self.tensor(position["bias_table"], torch.float32),
            logit_scale=logit_scale,
            head_scale=pack_head_scale(logit_scale),
            scale=attn.scale if attn.scale is not None else head_dim**-0.5,
            proj=self.linear(f"{at}.attn.proj", attn.proj.weight, attn.proj.bias),
            fc1=self.linear(f"{at}.mlp.fc1", mlp.fc1.weight, mlp.fc1.bias, norm2),
            fc2=self.linear(f"{at}.mlp.fc2", mlp.fc2.weight, mlp.fc2.bias),
            norm1=None if norm_first else self.norm(block.norm1),
            norm2=None if norm_first else self.norm(block.norm2),
            shifted=block.shifted,
            window_size=attn.window_size,
        )

    def merging(self, merging: PatchMerging, at: str) -> PreparedMerging:
        name, weight = f"{at}.reduction", merging.reduction.weight
        if merging.post_norm:
            return PreparedMerging(self.linear(name, weight, None), self.norm(merging.norm))
        return PreparedMerging(self.linear(name, weight, None, merging.norm), None)
