"""The readable Swin Transformer, V1 and V2, in the order of its data flow.

    image [B, 3, h, w] -> PatchEmbed [B, H, W, C] -> stages -> norm -> mean pool -> head
    V1 block   x = x + attn(norm1(x));  x = x + mlp(norm2(x))        (pre-norm)
    V2 block   x = x + norm1(attn(x));  x = x + norm2(mlp(x))        (post-norm)
    merging    [B, H, W, C] -> [B, H/2, W/2, 2C] after every stage but the last

The residual stream stays in image order ``[B, H, W, C]``; windows exist only inside
:func:`fastswin.ops.window_attention`. Layer names and state-dict keys are those of the official
repository (microsoft/Swin-Transformer), but without its derived buffers.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from fastswin import ops
from fastswin.models.config import SwinConfig
from fastswin.models.geometry import runtime_shift
from fastswin.models.position_bias import ContinuousPositionBias

Pair = tuple[int, int]


class PatchEmbed(nn.Module):
    """Image ``[B, 3, h, w]`` to tokens ``[B, H, W, C]``: strided convolution, then LayerNorm."""

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        self.config = config
        patch = config.patch_size
        self.proj = nn.Conv2d(config.in_channels, config.embed_dim, patch, stride=patch)
        self.norm = (
            nn.LayerNorm(config.embed_dim, eps=config.resample_eps)
            if config.patch_norm
            else nn.Identity()
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        check_images(images, self.config)
        x = self.proj(pad_to_patches(images, self.config)).permute(0, 2, 3, 1)
        return self.norm(x)


class WindowAttention(nn.Module):
    """Multi-head attention within windows ``[B, H, W, C] -> [B, H, W, C]``."""

    def __init__(self, config: SwinConfig, stage: int) -> None:
        super().__init__()
        dim, heads = config.dim(stage), config.num_heads[stage]
        self.num_heads = heads
        self.window_size = config.stage_window(stage)
        self.scale = config.qk_scale  # None: head_dim ** -0.5 in V1, no meaning in V2
        self.attn_drop_rate = config.attn_drop_rate
        if config.version == 1:
            rows = (2 * self.window_size[0] - 1) * (2 * self.window_size[1] - 1)
            self.relative_position_bias_table = nn.Parameter(torch.zeros(rows, heads))
            _init_truncated_normal(self.relative_position_bias_table)
            self.qkv = nn.Linear(dim, 3 * dim, bias=config.qkv_bias)
        else:
            self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10.0)))
            self.cpb_mlp = ContinuousPositionBias(
                heads, self.window_size, config.pretrained_window_size(stage)
            )
            self.qkv = nn.Linear(dim, 3 * dim, bias=False)
            self.q_bias = nn.Parameter(torch.zeros(dim)) if config.qkv_bias else None
            self.v_bias = nn.Parameter(torch.zeros(dim)) if config.qkv_bias else None
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(config.drop_rate)

    @property
    def qkv_bias(self) -> torch.Tensor | None:
        """Bias of the qkv projection ``[3C]``; V2 has none on the keys."""
        if hasattr(self, "cpb_mlp"):
            if self.q_bias is None or self.v_bias is None:
                return None
            return torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
        return self.qkv.bias

    def position_bias(self) -> dict[str, Any]:
        """The bias argument of :func:`fastswin.ops.window_attention`."""
        if hasattr(self, "cpb_mlp"):
            return {"bias_table": self.cpb_mlp.table(), "logit_scale": self.logit_scale}
        return {"bias_table": self.relative_position_bias_table}

    def forward(self, x: torch.Tensor, shift_size: Pair) -> torch.Tensor:
        qkv_bias = self.qkv_bias
        qkv = F.linear(x, self.qkv.weight, qkv_bias)
        out = ops.window_attention(
            qkv,
            num_heads=self.num_heads,
            window_size=self.window_size,
            shift_size=shift_size,
            scale=self.scale,
            qkv_bias=qkv_bias,
            dropout_p=self.attn_drop_rate if self.training else 0.0,
            **self.position_bias(),
        )
        return self.proj_drop(self.proj(out))


class Mlp(nn.Module):
    """``fc2(gelu(fc1(x)))`` with the exact (erf) GELU."""

    def __init__(self, dim: int, hidden_dim: int, drop_rate: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop = nn.Dropout(drop_rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.fc2(self.drop(F.gelu(self.fc1(x)))))


class DropPath(nn.Module):
    """Stochastic depth: drops the whole branch of a random subset of images while training."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        keep = 1.0 - self.rate
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x * x.new_empty(shape).bernoulli_(keep).div_(keep)


class SwinTransformerBlock(nn.Module):
    """Attention half and MLP half, each with its residual; odd blocks are shifted."""

    def __init__(self, config: SwinConfig, stage: int, block: int, drop_path_rate: float) -> None:
        super().__init__()
        dim = config.dim(stage)
        self.post_norm = config.version == 2
        self.shifted = block % 2 == 1
        self.norm1 = nn.LayerNorm(dim, eps=config.layer_norm_eps)
        self.attn = WindowAttention(config, stage)
        self.norm2 = nn.LayerNorm(dim, eps=config.layer_norm_eps)
        self.mlp = Mlp(dim, config.hidden_dim(stage), config.drop_rate)
        self.drop_path = DropPath(drop_path_rate)
        if self.post_norm:  # the official initialisation: a new block is the identity
            nn.init.zeros_(self.norm1.weight)
            nn.init.zeros_(self.norm2.weight)

    def forward(self, x: torch.Tensor, shift_size: Pair) -> torch.Tensor:
        shift = shift_size if self.shifted else (0, 0)
        if self.post_norm:
            x = x + self.drop_path(self.norm1(self.attn(x, shift)))
            return x + self.drop_path(self.norm2(self.mlp(x)))
        x = x + self.drop_path(self.attn(self.norm1(x), shift))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PatchMerging(nn.Module):
    """2x2 neighbours to one token, ``[B, H, W, C] -> [B, ceil(H/2), ceil(W/2), 2C]``."""

    def __init__(self, config: SwinConfig, stage: int) -> None:
        super().__init__()
        dim = config.dim(stage)
        self.post_norm = config.version == 2
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)
        self.norm = nn.LayerNorm((2 if self.post_norm else 4) * dim, eps=config.resample_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = gather_neighbours(x)
        if self.post_norm:
            return self.norm(self.reduction(x))
        return self.reduction(self.norm(x))


class SwinTransformerStage(nn.Module):
    """Blocks at one resolution, then the merging that leads to the next."""

    def __init__(self, config: SwinConfig, stage: int, drop_path_rates: list[float]) -> None:
        super().__init__()
        self.config, self.stage = config, stage
        self.blocks = nn.ModuleList(
            SwinTransformerBlock(config, stage, block, drop_path_rates[block])
            for block in range(config.depths[stage])
        )
        last = stage == config.num_stages - 1
        self.downsample = None if last else PatchMerging(config, stage)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks; the caller merges, so that stage outputs can be kept."""
        map_size = (x.shape[1], x.shape[2])
        window = self.config.stage_window(self.stage)
        shift = runtime_shift(map_size, window, self.config.window_convention, stage=self.stage)
        for block in self.blocks:
            x = block(x, shift)
        return x


class SwinTransformer(nn.Module):
    """Swin Transformer V1 or V2 as :class:`SwinConfig` describes it."""

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        if config.absolute_position_embedding:
            H, W = config.map_size(0)
            self.absolute_pos_embed = nn.Parameter(torch.zeros(1, H * W, config.embed_dim))
            _init_truncated_normal(self.absolute_pos_embed)
        self.pos_drop = nn.Dropout(config.drop_rate)
        last_block = max(sum(config.depths) - 1, 1)  # plain numbers: the meta device has no values
        rates = [config.drop_path_rate * i / last_block for i in range(sum(config.depths))]
        self.layers = nn.ModuleList()
        for stage, depth in enumerate(config.depths):
            self.layers.append(SwinTransformerStage(config, stage, rates[:depth]))
            rates = rates[depth:]
        self.norm = nn.LayerNorm(config.num_features, eps=config.layer_norm_eps)
        self.head = (
            nn.Linear(config.num_features, config.num_classes)
            if config.num_classes
            else nn.Identity()
        )
        self.apply(_init_linear)

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        """Images ``[B, 3, h, w]`` to the residual stream ``[B, H, W, C]``."""
        x = self.patch_embed(images)
        if self.config.absolute_position_embedding:
            x = x + self._position_embedding((x.shape[1], x.shape[2]))
        return self.pos_drop(x)

    def _position_embedding(self, map_size: Pair) -> torch.Tensor:
        """``[1, H, W, C]``, resized bicubically where the map differs from the built one."""
        built = self.config.map_size(0)
        position = self.absolute_pos_embed.view(1, *built, -1)
        if map_size != built:
            position = F.interpolate(
                position.permute(0, 3, 1, 2), size=map_size, mode="bicubic", align_corners=False
            ).permute(0, 2, 3, 1)
        return position

    def forward_features(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Output of every stage before merging, ``[B, H_i, W_i, C * 2**i]`` (no final norm)."""
        x = self.embed(images)
        outputs = []
        for layer in cast("list[SwinTransformerStage]", self.layers):
            x = layer(x)
            outputs.append(x)
            if layer.downsample is not None:
                x = layer.downsample(x)
        return outputs

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, num_classes]``, or pooled features ``[B, C]`` without a head."""
        x = self.norm(self.forward_features(images)[-1])
        return self.head(x.mean(dim=(1, 2)))


def check_images(images: torch.Tensor, config: SwinConfig) -> None:
    """Raise ValueError or TypeError, naming the argument, unless ``images`` fits the model."""
    if images.ndim != 4:
        raise ValueError(
            f"images must have 4 dimensions [B, {config.in_channels}, height, width], "
            f"got shape {tuple(images.shape)}"
        )
    if images.shape[1] != config.in_channels:
        raise ValueError(
            f"images must have {config.in_channels} channels (axis 1), "
            f"got shape {tuple(images.shape)}"
        )
    if not images.dtype.is_floating_point:
        raise TypeError(
            f"images must be a float tensor (normalised pixels), got {images.dtype}; "
            "convert with images.float() / 255 and normalise"
        )
    if min(images.shape[2:]) < config.patch_size:
        raise ValueError(
            f"images of {images.shape[2]}x{images.shape[3]} px are smaller than one patch "
            f"({config.patch_size} px)"
        )


def pad_to_patches(images: torch.Tensor, config: SwinConfig) -> torch.Tensor:
    """Zero-pad bottom and right to whole patches (torchvision drops the remainder instead)."""
    patch = config.patch_size
    bottom, right = -images.shape[2] % patch, -images.shape[3] % patch
    if config.window_convention == "torchvision" or not (bottom or right):
        return images
    return F.pad(images, (0, right, 0, bottom))


def gather_neighbours(x: torch.Tensor) -> torch.Tensor:
    """``[B, H, W, C] -> [B, ceil(H/2), ceil(W/2), 4C]``; odd sides are zero-padded at the end.

    Order of the four: (even row, even column), (odd, even), (even, odd), (odd, odd).
    """
    _, H, W, _ = x.shape
    if H % 2 or W % 2:
        x = F.pad(x, (0, 0, 0, W % 2, 0, H % 2))
    return torch.cat(
        (x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]), dim=-1
    )


def _init_truncated_normal(weight: torch.Tensor) -> None:
    """The official initialisation of matrices and tables; nothing on the meta device.

    A model that is about to receive weights is built there. It has no values, but torch 2.11 takes
    its erfinv from a decomposition, for which it imports its compiler: 2 to 4 s of a start.
    """
    if not weight.is_meta:
        nn.init.trunc_normal_(weight, std=0.02)


def _init_linear(module: nn.Module) -> None:
    """The official initialisation of linear layers."""
    if isinstance(module, nn.Linear):
        _init_truncated_normal(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
