"""Small reference models of every framework with weights moved away from their defaults."""

from __future__ import annotations

import functools

import torch
from microsoft_style import MsSwin
from torch import nn

from fastswin.models import SwinConfig, SwinTransformer

#: (framework, version) of every reference.
KINDS = [
    (framework, version)
    for framework in ("timm", "torchvision", "huggingface", "microsoft")
    for version in (1, 2)
]
KIND_IDS = [f"{framework}-v{version}" for framework, version in KINDS]

IMAGE = (64, 96)  # a multiple of window * patch * 2 on both axes, and not square
SIZES = {"embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
WINDOW = 4
CLASSES = 7


def perturb(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter away from its default: norms, biases, tables, temperatures."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if "logit_scale" in name:
                p.add_(0.3 * noise)
            elif "bias_table" in name or "position_embeddings" in name or "absolute" in name:
                p.copy_(0.5 * noise)
            elif p.ndim == 1 and name.endswith("weight"):
                p.copy_(1 + 0.2 * noise)
            elif p.ndim == 1:
                p.copy_(0.1 * noise)
            else:
                p.copy_(noise * p[0].numel() ** -0.5)
    return model.eval()


def build(framework: str, version: int, *, image=IMAGE, window=WINDOW, **settings) -> nn.Module:
    """One reference model; settings take the framework's own names."""
    return perturb(_BUILDERS[framework](version, image, window, {**SIZES, **settings}))


def _timm(version, image, window, settings):
    from timm.models.swin_transformer import SwinTransformer as TimmSwin
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    kind = TimmSwin if version == 1 else SwinTransformerV2
    if version == 2:
        settings.setdefault("pretrained_window_sizes", (0,) * len(settings["depths"]))
    return kind(img_size=image, window_size=window, **{"num_classes": CLASSES, **settings})


def _torchvision(version, image, window, settings):
    from torchvision.models import swin_transformer as tv

    v2 = {"block": tv.SwinTransformerBlockV2, "downsample_layer": tv.PatchMergingV2}
    del image
    return tv.SwinTransformer(
        patch_size=[4, 4],
        window_size=[window, window] if isinstance(window, int) else list(window),
        **{"num_classes": CLASSES, **settings, **(v2 if version == 2 else {})},
    )


def _huggingface(version, image, window, settings):
    import transformers

    num_labels = settings.pop("num_classes", CLASSES)
    kind, config = (
        (transformers.SwinForImageClassification, transformers.SwinConfig)
        if version == 1
        else (transformers.Swinv2ForImageClassification, transformers.Swinv2Config)
    )
    return kind(
        config(image_size=list(image), window_size=window, num_labels=num_labels, **settings)
    )


def _microsoft(version, image, window, settings):
    return MsSwin(image, window_size=window, version=version, **settings)


_BUILDERS = {
    "timm": _timm,
    "torchvision": _torchvision,
    "huggingface": _huggingface,
    "microsoft": _microsoft,
}


@functools.cache
def reference(framework: str, version: int) -> nn.Module:
    """The default reference, built once; treat it as read-only."""
    return build(framework, version)


def logits(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """A model's logits, whatever it returns."""
    with torch.no_grad():
        out = model(images)
    return out if isinstance(out, torch.Tensor) else out.logits


def images_of(size=IMAGE, batch: int = 3) -> torch.Tensor:
    """Distinct images ``[batch, 3, height, width]``."""
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(5))


def our_model(version: int = 1, seed: int = 0, **settings) -> SwinTransformer:
    """A perturbed model of ours."""
    values = {"image_size": IMAGE, "window_size": WINDOW, "num_classes": CLASSES, **SIZES}
    return perturb(SwinTransformer(SwinConfig(version=version, **{**values, **settings})), seed)
