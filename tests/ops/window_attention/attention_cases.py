"""Shapes that every attention test shares: each one a way to be wrong."""

from __future__ import annotations

import dataclasses

import torch

from fastswin import ops

Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem in image order."""

    name: str
    map_size: Pair
    window_size: Pair
    shift_size: Pair = (0, 0)
    num_heads: int = 2
    head_dim: int = 16
    cosine: bool = False
    batch: int = 2

    def __str__(self) -> str:
        return self.name


#: The interpreter takes a tenth of a second for a head of a window, so there are few of these. The
#: first list differs in the product: tokens, tiles, head_dim, cosine.
PRODUCT_CASES = [
    Case("n49", (14, 14), (7, 7)),
    Case("n64-cosine-shifted", (16, 8), (8, 8), (4, 4), cosine=True),
    Case("n144-two-tiles", (12, 24), (12, 12), (6, 6), head_dim=32, num_heads=1),
    Case("n256-cosine", (16, 16), (16, 16), cosine=True, num_heads=1),
    Case("n260-online-shifted-one-axis", (13, 40), (13, 20), (0, 10), num_heads=1, batch=1),
    Case("n320-online-cosine", (16, 20), (16, 20), num_heads=1, batch=1, cosine=True),
    Case("head-dim-24", (8, 12), (4, 4), (2, 2), head_dim=24, batch=1),
    Case("head-dim-128", (6, 8), (3, 4), (1, 2), head_dim=128, num_heads=1),
    Case("window-wider-than-map", (3, 4), (7, 7)),
]
#: And the second in what is read from where: map, padding, shift, images, heads.
GEOMETRY_CASES = [
    Case("n49-shifted-tall", (21, 14), (7, 7), (3, 3), num_heads=1, head_dim=32),
    Case("n49-shifted-padded", (9, 10), (7, 7), (3, 3)),
    Case("n64-cosine-padded", (10, 9), (8, 8), (4, 4), cosine=True, num_heads=1),
    Case("rectangular", (10, 9), (5, 3), (2, 1), num_heads=3, batch=1),
    Case("window-of-one", (3, 4), (1, 1), num_heads=1),
    Case("one-axis-single-window", (7, 21), (7, 7), (0, 3)),
    Case("eleven-heads", (4, 8), (4, 4), (0, 2), num_heads=11, batch=1),
]

LARGE_CASES = [
    Case("swin-t-stage1", (56, 56), (7, 7), (3, 3), 3, 32, batch=32),
    Case("swin-t-stage3", (14, 14), (7, 7), (3, 3), 12, 32, batch=64),
    Case("swin-b-384-stage1", (96, 96), (12, 12), (6, 6), 4, 32, batch=8),
    Case("swinv2-w8", (64, 64), (8, 8), (4, 4), 3, 32, cosine=True, batch=16),
    Case("swinv2-w16", (64, 64), (16, 16), (8, 8), 4, 32, cosine=True, batch=8),
    Case("swinv2-w24", (96, 96), (24, 24), (12, 12), 4, 32, cosine=True, batch=4),
    Case("c24", (64, 64), (8, 8), (4, 4), 4, 24, batch=16),
    Case("detection-padded", (200, 334), (7, 7), (3, 3), 3, 32, batch=2),
]


def arguments(case: Case, randn, dtype: torch.dtype, spread: float = 1.0) -> dict:
    """Arguments of :func:`fastswin.ops.window_attention`, distinct per image and window."""
    H, W = case.map_size
    N = case.window_size[0] * case.window_size[1]
    channels = 3 * case.num_heads * case.head_dim
    made = {
        "qkv": randn(case.batch, H, W, channels, dtype=dtype, spread=spread),
        "num_heads": case.num_heads,
        "window_size": case.window_size,
        "shift_size": case.shift_size,
        "bias": randn(case.num_heads, N, N),
        "qkv_bias": randn(channels, dtype=dtype),
    }
    if case.cosine:
        made["logit_scale"] = 2.0 + randn(case.num_heads, 1, 1)
    return made


def oracle(made: dict) -> torch.Tensor:
    """The reference in fp64 on the same (target-dtype) inputs."""
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in made.items()}
    return ops.window_attention(**wide, impl="reference")


def eager(made: dict) -> torch.Tensor:
    """What a framework computes in the inputs' dtype: every step rounded to it."""
    qkv = made["qkv"]
    dtype = qkv.dtype
    heads = made["num_heads"]

    def attend(q, k, v, bias, mask):
        if "logit_scale" in made:
            temperature = made["logit_scale"].clamp(max=4.6051702).exp().to(dtype)
            scores = torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(
                k, dim=-1
            ).transpose(-2, -1)
            scores = scores * temperature
        else:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        scores = scores + bias.to(dtype)
        if mask is not None:
            windows = mask.shape[0]
            scores = scores.view(-1, windows, *scores.shape[1:]) + mask[:, None].to(dtype)
            scores = scores.view(-1, *scores.shape[2:])
        return scores.softmax(-1) @ v

    from fastswin.ops.window_attention.geometry import num_windows, shift_attention_mask
    from fastswin.ops.window_attention.reference import partition, unpartition

    B, H, W, channels = qkv.shape
    window, shift = made["window_size"], made["shift_size"]
    rows, cols = num_windows((H, W), window)
    padded = (rows * window[0], cols * window[1])
    x = made["qkv_bias"].expand(B, *padded, channels).clone()
    x[:, :H, :W] = qkv
    x = torch.roll(x, (-shift[0], -shift[1]), (1, 2))
    x = partition(x, window)
    q, k, v = x.view(x.shape[0], x.shape[1], 3, heads, -1).permute(2, 0, 3, 1, 4)
    mask = None
    if shift != (0, 0):
        mask = shift_attention_mask((H, W), window, shift, qkv.device)
    out = attend(q, k, v, made["bias"], mask).transpose(1, 2).flatten(2)
    out = torch.roll(unpartition(out, window, B, padded), shift, (1, 2))
    return out[:, :H, :W]
