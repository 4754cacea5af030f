"""The recipe of the shipped Fashion-MNIST model: configuration, augmentation and schedule.

Every augmentation is one batch operation on the device of the images, normalised
``[B, 1, 28, 28]``; :mod:`train_fashion` runs them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fastswin.data.fashion_mnist import PREPROCESS
from fastswin.models import SwinConfig

CONFIG = SwinConfig(
    image_size=(112, 112),
    patch_size=4,
    in_channels=1,
    num_classes=10,
    embed_dim=64,
    depths=(2, 4, 1),
    num_heads=(2, 4, 8),
    window_size=(7, 7),
    drop_path_rate=0.05,
)

#: The background of these images, normalised.
BLACK = -PREPROCESS.mean[0] / PREPROCESS.std[0]


@dataclass(frozen=True)
class Recipe:
    """What decides the weights, apart from the data, the seed and the card's arithmetic."""

    batch: int = 512
    peak_learning_rate: float = 2e-3
    weight_decay: float = 0.05
    warmup_fraction: float = 0.05
    label_smoothing: float = 0.05
    clip_grad_norm: float = 1.0
    ema_decay: float = 0.999
    crop_padding: int = 1
    flip_probability: float = 0.5
    erase_probability: float = 0.15
    mixup_alpha: float = 0.0
    max_epochs: int = 120


def augment(x: torch.Tensor, recipe: Recipe, generator: torch.Generator) -> torch.Tensor:
    """Random flip, padded crop and erasing of normalised images ``[B, 1, 28, 28]``."""
    B, _, H, W = x.shape

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=x.device, generator=generator)

    x = torch.where(uniform(B, 1, 1, 1) < recipe.flip_probability, x.flip(3), x)

    pad = recipe.crop_padding
    padded = F.pad(x, (pad,) * 4, value=BLACK)
    offset = (uniform(2, B, 1) * (2 * pad + 1)).long()
    rows = offset[0] + torch.arange(H, device=x.device)
    columns = offset[1] + torch.arange(W, device=x.device)
    images = torch.arange(B, device=x.device)
    x = padded[images[:, None, None], :, rows[:, :, None], columns[:, None, :]].movedim(3, 1)

    area = 0.02 + 0.28 * uniform(B)  # of the image, the side ratio log-uniform in [1/3, 3]
    ratio = torch.exp((2 * uniform(B) - 1) * math.log(3.0))
    height, width = (area * ratio).sqrt() * H, (area / ratio).sqrt() * W
    top, left = uniform(B) * (H - height).clamp_min(0), uniform(B) * (W - width).clamp_min(0)
    row, column = torch.arange(H, device=x.device), torch.arange(W, device=x.device)
    inside = (
        ((row >= top[:, None]) & (row < (top + height)[:, None]))[:, :, None]
        & ((column >= left[:, None]) & (column < (left + width)[:, None]))[:, None, :]
        & (uniform(B) < recipe.erase_probability)[:, None, None]
    )
    noise = torch.randn(x.shape, device=x.device, generator=generator)
    return torch.where(inside[:, None], noise, x)


def mixup(
    x: torch.Tensor, labels: torch.Tensor, recipe: Recipe, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blend each image and its smoothed one-hot target with another of the batch.

    The weight is Beta(a, a), drawn as ``u^(1/a) / (u^(1/a) + v^(1/a))`` given that the sum is at
    most 1 (Joehnk); draws that miss are not blended, which keeps it one batch operation.
    """
    target = F.one_hot(labels, CONFIG.num_classes).float()
    target = target * (1 - recipe.label_smoothing) + recipe.label_smoothing / CONFIG.num_classes
    if recipe.mixup_alpha <= 0:
        return x, target
    B = len(x)
    u, v = torch.rand(2, B, device=x.device, generator=generator).pow(1 / recipe.mixup_alpha)
    weight = torch.where(u + v <= 1, u / (u + v).clamp_min(1e-30), 1.0)
    partner = torch.randperm(B, device=x.device, generator=generator)
    image_weight, target_weight = weight.view(B, 1, 1, 1), weight.view(B, 1)
    return (
        x * image_weight + x[partner] * (1 - image_weight),
        target * target_weight + target[partner] * (1 - target_weight),
    )


def learning_rate(progress: float, recipe: Recipe) -> float:
    """Linear warm-up, then cosine to zero; progress runs from 0 to 1."""
    if progress < recipe.warmup_fraction:
        return recipe.peak_learning_rate * (progress + 1e-3) / (recipe.warmup_fraction + 1e-3)
    t = (progress - recipe.warmup_fraction) / (1 - recipe.warmup_fraction)
    return recipe.peak_learning_rate * 0.5 * (1 + math.cos(math.pi * min(t, 1.0)))
