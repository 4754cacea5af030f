"""A small independent Swin in the manner of microsoft/Swin-Transformer, for tests only.

Tokens are kept flat ``[B, L, C]``, windows are cut with explicit loops over slices, masks and
indices are persistent buffers, and the window shrinks to ``min(H, W)`` as that repository does.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class MsPatchEmbed(nn.Module):
    def __init__(self, img_size, patch_size, dim, patch_norm):
        super().__init__()
        self.img_size, self.patch_size = img_size, (patch_size, patch_size)
        self.patches_resolution = [img_size[0] // patch_size, img_size[1] // patch_size]
        self.proj = nn.Conv2d(3, dim, patch_size, stride=patch_size)
        self.norm = nn.LayerNorm(dim) if patch_norm else None

    def forward(self, x):
        x = self.proj(x).flatten(2).transpose(1, 2)
        return x if self.norm is None else self.norm(x)


class MsAttention(nn.Module):
    def __init__(self, dim, window, heads, version, qkv_bias, qk_scale, pretrained):
        super().__init__()
        self.window_size, self.num_heads, self.version = (window, window), heads, version
        self.pretrained_window_size = (pretrained, pretrained)
        offsets = range(-(window - 1), window)
        table = [(dy, dx) for dy in offsets for dx in offsets]
        cells = [(y, x) for y in range(window) for x in range(window)]
        index = [[table.index((a - c, b - d)) for c, d in cells] for a, b in cells]
        self.register_buffer("relative_position_index", torch.tensor(index))
        if version == 1:
            self.scale = qk_scale or (dim // heads) ** -0.5
            self.relative_position_bias_table = nn.Parameter(torch.zeros(len(table), heads))
            self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        else:
            coords = torch.tensor(table, dtype=torch.float32) * 8
            coords = coords / max((pretrained or window) - 1, 1)
            coords = coords.sign() * (coords.abs() + 1).log2() / 3
            self.register_buffer(
                "relative_coords_table", coords.view(1, 2 * window - 1, 2 * window - 1, 2)
            )
            self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10)))
            self.cpb_mlp = nn.Sequential(
                nn.Linear(2, 512), nn.ReLU(), nn.Linear(512, heads, bias=False)
            )
            self.qkv = nn.Linear(dim, 3 * dim, bias=False)
            self.q_bias = nn.Parameter(torch.zeros(dim)) if qkv_bias else None
            self.v_bias = nn.Parameter(torch.zeros(dim)) if qkv_bias else None
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask):
        windows, tokens, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.version == 2 and self.q_bias is not None:
            q, v = q + self.q_bias, v + self.v_bias
        q, k, v = (t.view(windows, tokens, self.num_heads, -1).transpose(1, 2) for t in (q, k, v))
        if self.version == 1:
            scores = q @ k.transpose(-1, -2) * self.scale
            table = self.relative_position_bias_table
        else:
            scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2)
            scores = scores * self.logit_scale.clamp(max=math.log(100)).exp()
            table = 16 * self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads).sigmoid()
        scores = scores + table[self.relative_position_index].permute(2, 0, 1)
        if mask is not None:
            scores = scores + mask.repeat(windows // len(mask), 1, 1)[:, None]
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


class MsMlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class MsBlock(nn.Module):
    def __init__(self, dim, resolution, heads, window, shift, ratio, version, **attention):
        super().__init__()
        self.input_resolution, self.version = resolution, version
        if min(resolution) <= window:
            window, shift = min(resolution), 0
        self.window_size, self.shift_size = window, shift
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = MsAttention(dim, window, heads, version, **attention)
        self.mlp = MsMlp(dim, int(dim * ratio))
        if shift:
            region = torch.zeros(resolution)
            cuts = [slice(0, -window), slice(-window, -shift), slice(-shift, None)]
            for number, (rows, columns) in enumerate((r, c) for r in cuts for c in cuts):
                region[rows, columns] = number
            parts = torch.stack([w.flatten() for w in self.windows(region)])
            self.register_buffer("attn_mask", (parts[:, :, None] != parts[:, None]).float() * -100)
        else:
            self.attn_mask = None

    def windows(self, image):
        size = self.window_size
        return [r for rows in image.split(size) for r in rows.split(size, dim=1)]

    def attend(self, x):
        batch, (rows, columns), size = len(x), self.input_resolution, self.window_size
        x = x.view(batch, rows, columns, -1).roll((-self.shift_size,) * 2, (1, 2))
        cut = torch.stack([w for image in x for w in self.windows(image)])
        out = self.attn(cut.flatten(1, 2), self.attn_mask).view(batch, -1, size, size, x.shape[-1])
        per_row = columns // size
        images = [
            torch.cat([torch.cat(list(o[i : i + per_row]), 1) for i in range(0, len(o), per_row)])
            for o in out
        ]
        return torch.stack(images).roll((self.shift_size,) * 2, (1, 2)).flatten(1, 2)

    def forward(self, x):
        if self.version == 2:
            x = x + self.norm1(self.attend(x))
            return x + self.norm2(self.mlp(x))
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MsMerging(nn.Module):
    def __init__(self, dim, resolution, version):
        super().__init__()
        self.input_resolution, self.version = resolution, version
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)
        self.norm = nn.LayerNorm((4 if version == 1 else 2) * dim)

    def forward(self, x):
        x = x.view(len(x), *self.input_resolution, -1)
        x = torch.cat([x[:, r::2, c::2] for c in (0, 1) for r in (0, 1)], -1).flatten(1, 2)
        return self.reduction(self.norm(x)) if self.version == 1 else self.norm(self.reduction(x))


class MsStage(nn.Module):
    def __init__(self, blocks, downsample):
        super().__init__()
        self.blocks, self.downsample = nn.ModuleList(blocks), downsample

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x if self.downsample is None else self.downsample(x)


class MsSwin(nn.Module):
    def __init__(
        self, img_size, embed_dim, depths, num_heads, window_size, *, version=1, patch_size=4,
        num_classes=7, mlp_ratio=4.0, ape=False, patch_norm=True, qkv_bias=True, qk_scale=None,
        pretrained_window_sizes=None,
    ):  # fmt: skip
        super().__init__()
        self.patch_embed = MsPatchEmbed(img_size, patch_size, embed_dim, patch_norm)
        side = self.patch_embed.patches_resolution
        self.ape = ape
        if ape:
            self.absolute_pos_embed = nn.Parameter(torch.zeros(1, side[0] * side[1], embed_dim))
        stages, last = [], len(depths) - 1
        for i, depth in enumerate(depths):
            dim, resolution = embed_dim * 2**i, (side[0] // 2**i, side[1] // 2**i)
            blocks = [
                MsBlock(
                    dim, resolution, num_heads[i], window_size, window_size // 2 * (j % 2),
                    mlp_ratio, version, qkv_bias=qkv_bias, qk_scale=qk_scale,
                    pretrained=pretrained_window_sizes[i] if pretrained_window_sizes else 0,
                )
                for j in range(depth)
            ]  # fmt: skip
            stages.append(
                MsStage(blocks, MsMerging(dim, resolution, version) if i < last else None)
            )
        self.layers = nn.ModuleList(stages)
        self.norm = nn.LayerNorm(embed_dim * 2**last)
        self.head = nn.Linear(embed_dim * 2**last, num_classes)

    def forward(self, x):
        x = self.patch_embed(x)
        if self.ape:
            x = x + self.absolute_pos_embed
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))
