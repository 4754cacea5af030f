"""The readable Swin rewritten for export at any image size, in image order.

Steps that depend on the size are placeholder nodes (dynamic_functions.py says what they compute);
everything between them is free of sizes. Values exist only in the exported graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import nn

from fastswin.export import dynamic_functions as functions
from fastswin.export.graph_attention import GraphAttention
from fastswin.export.graph_layers import GraphLinear, GraphMlp, GraphNorm, GraphPatchEmbed
from fastswin.models.config import SwinConfig
from fastswin.models.swin import (
    PatchMerging,
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerStage,
)
from fastswin.ops.window_attention.geometry import num_windows

Pair = tuple[int, int]
Size = int | torch.SymInt


class Windows(NamedTuple):
    """Geometry tensors of one kind of block, and the size they were traced at."""

    order: torch.Tensor
    keep: torch.Tensor
    place: torch.Tensor
    mask: torch.Tensor


class FunctionTable:
    """The bodies of all placeholders that one model uses, by name."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def call(
        self,
        text: str,
        inputs: list[torch.Tensor],
        shapes: list[tuple[Size, ...]],
        dtypes: list[torch.dtype],
    ) -> tuple[torch.Tensor, ...]:
        """A placeholder node for a function; ``shapes`` are those at the traced size."""
        name = text.split()[0]
        self.texts[name] = text
        outputs = torch.onnx.ops.symbolic_multi_out(
            f"{functions.DOMAIN}::{name}", inputs, dtypes=dtypes, shapes=shapes, version=1
        )
        return tuple(outputs)

    def protos(self, opset: int) -> list[Any]:
        """Every body as an ``onnx.FunctionProto``."""
        return [functions.parse(text, opset) for text in self.texts.values()]


class DynamicBlock(nn.Module):
    """One block on a map of any size."""

    def __init__(self, block: SwinTransformerBlock, table: FunctionTable) -> None:
        super().__init__()
        self.post_norm, self.shifted, self.table = block.post_norm, block.shifted, table
        self.norm1, self.norm2 = GraphNorm(block.norm1), GraphNorm(block.norm2)
        self.attn = DynamicAttention(block.attn, table)
        self.mlp = GraphMlp(block.mlp.fc1, block.mlp.fc2)

    def forward(self, x: torch.Tensor, windows: Windows) -> torch.Tensor:
        if self.post_norm:
            x = x + self.norm1(self.attention(x, windows))
            return x + self.norm2(self.mlp(x))
        x = x + self.attention(self.norm1(x), windows)
        return x + self.mlp(self.norm2(x))

    def attention(self, x: torch.Tensor, windows: Windows) -> torch.Tensor:
        tokens, channels = self.attn.tokens, x.shape[-1]
        count = windows.order.shape[0] // tokens
        (parts,) = self.table.call(
            functions.partition(f"Partition_{tokens}_{channels}", tokens, channels),
            [x, windows.order, windows.keep],
            [(x.shape[0] * count, tokens, channels)],
            [x.dtype],
        )
        out = self.attn(parts, windows.mask if self.shifted else None)
        (x,) = self.table.call(
            functions.unpartition(f"Unpartition_{channels}", channels),
            [out, windows.order, windows.place, x],
            [tuple(x.shape)],
            [x.dtype],
        )
        return x


class DynamicAttention(GraphAttention):
    """Attention over windows ``[B * nW, N, C]`` where ``nW`` is known only when the graph runs."""

    def __init__(self, attention: nn.Module, table: FunctionTable) -> None:
        super().__init__(cast("Any", attention), "plain")
        self.table = table

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None, keep: torch.Tensor | None = None
    ) -> torch.Tensor:
        split = (self.tokens, self.num_heads, self.head_dim)
        qkv = self.qkv(x)
        shape = (*qkv.shape[:-1], qkv.shape[-1] // 3)
        parts = self.table.call(functions.split(), [qkv], [shape] * 3, [qkv.dtype] * 3)
        q, k, v = (self.shaped(part, split) for part in parts)
        out = self.attend(q, k, v, mask)
        return self.proj(self.shaped(out, (self.tokens, self.num_heads * self.head_dim)))

    def shaped(self, x: torch.Tensor, rest: tuple[int, ...]) -> torch.Tensor:
        """``x`` as ``[B * nW, *rest]``."""
        name = "Reshape_" + "_".join(map(str, rest))
        (x,) = self.table.call(functions.reshape(name, rest), [x], [(x.shape[0], *rest)], [x.dtype])
        return x

    def biased(self, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if mask is None:
            return scores + self.bias
        (sums,) = self.table.call(
            functions.add_bias(
                f"AddBias_{self.tokens}_{self.num_heads}", self.tokens, self.num_heads
            ),
            [scores, self.bias, mask],
            [tuple(scores.shape)],
            [scores.dtype],
        )
        return sums


class DynamicMerging(nn.Module):
    """Patch merging of a map whose sides may be odd."""

    def __init__(self, merging: PatchMerging, table: FunctionTable) -> None:
        super().__init__()
        self.post_norm, self.table = merging.post_norm, table
        self.reduction = GraphLinear(merging.reduction.weight, None)
        self.norm = GraphNorm(merging.norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, H, W, C = x.shape
        shape = (B, (H + 1) // 2, (W + 1) // 2, 4 * C)
        (x,) = self.table.call(functions.merge(), [x], [shape], [x.dtype])
        return self.norm(self.reduction(x)) if self.post_norm else self.reduction(self.norm(x))


class DynamicSwin(nn.Module):
    """A Swin Transformer for images of any size from its smallest legal one up.

    Attributes:
        table: bodies of the placeholder nodes, filled while the model is traced.
    """

    def __init__(self, model: SwinTransformer, *, features: bool = False) -> None:
        """Copy a readable model's weights into constants.

        Args:
            model: the readable model, fp32.
            features: return the stages' maps instead of the logits.

        Raises:
            ValueError: the model has an absolute position embedding, which belongs to one size.
        """
        super().__init__()
        if model.config.absolute_position_embedding:
            raise ValueError(
                "dynamic_size: this model has an absolute position embedding, which belongs to "
                "one image size; export one graph a size with image_size="
            )
        self.config, self.features, self.table = model.config, features, FunctionTable()
        self.patch_embed = GraphPatchEmbed(model.patch_embed, None)
        self.layers = nn.ModuleList()
        for stage in cast("list[SwinTransformerStage]", model.layers):
            blocks = nn.ModuleList(
                DynamicBlock(block, self.table)
                for block in cast("list[SwinTransformerBlock]", stage.blocks)
            )
            layer = nn.ModuleDict({"blocks": blocks})
            if stage.downsample is not None:
                layer["downsample"] = DynamicMerging(stage.downsample, self.table)
            self.layers.append(layer)
        self.norm = GraphNorm(model.norm)
        self.head = (
            GraphLinear(model.head.weight, model.head.bias)
            if isinstance(model.head, nn.Linear)
            else nn.Identity()
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Logits ``[B, classes]`` or, with ``features``, one map a stage; fp32."""
        patch = self.config.patch_size
        if self.config.window_convention != "torchvision":  # its convolution drops the remainder
            B, C, h, w = images.shape
            shape = (B, C, -(-h // patch) * patch, -(-w // patch) * patch)
            (images,) = self.table.call(
                functions.pad_images(patch), [images], [shape], [images.dtype]
            )
        x = self.patch_embed.map(images.to(self.patch_embed.weight.dtype))
        outputs = []
        for index, layer in enumerate(cast("list[nn.ModuleDict]", self.layers)):
            blocks = cast("list[DynamicBlock]", layer["blocks"])
            kinds = {s: self.windows(x, index, s) for s in {block.shifted for block in blocks}}
            for block in blocks:
                x = block(x, kinds[block.shifted])
            if self.features:
                outputs.append(x.float())
            if "downsample" in layer:
                x = layer["downsample"](x)
        if self.features:
            return tuple(outputs)
        return self.head(self.norm(x).mean((1, 2))).float()

    def windows(self, x: torch.Tensor, stage: int, shifted: bool) -> Windows:
        """The node that computes one kind of block's geometry from the map's size."""
        config: SwinConfig = self.config
        window = config.stage_window(stage)
        H, W = x.shape[1:3]
        rows, cols = num_windows((H, W), window)
        count, tokens = rows * cols, window[0] * window[1]
        return Windows(
            *self.table.call(
                functions.windows(
                    f"Windows_{window[0]}_{window[1]}{'_shifted' * shifted}",
                    window, shifted, config.window_convention,
                ),
                [x],
                [(count * tokens,), (count * tokens, 1), (H * W,), (count, 1, tokens, tokens)],
                [torch.int64, torch.float32, torch.int64, torch.float32],
            )
        )  # fmt: skip
