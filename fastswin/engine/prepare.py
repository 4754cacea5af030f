"""Load-time work: a model's weights in the form the forward pass reads.

Once per load: LayerNorm's affine is folded into the linear layer behind it (V1), the relative
position bias becomes dense, V2's bias MLP and temperature are evaluated, everything is cast and
made contiguous on the device. Biases and norms stay fp32; matrices take the engine's dtype.

    linear(norm(x) * g + b) = (norm(x)) @ (W * g).T + (W @ b + bias)
"""

from __future__ import annotations

from typing import cast

import torch

from fastswin.engine.prepared import (
    Affine,
    Footprint,
    Linear,
    Norm,
    PreparedBlock,
    PreparedMerging,
    PreparedModel,
)
from fastswin.models.swin import (
    PatchMerging,
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerStage,
)
from fastswin.ops.window_attention.packing import pack_head_scale


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
