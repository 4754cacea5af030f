"""Tiny Swin models of every framework: maps that are not square, shifted blocks, odd weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from microsoft_style import MsSwin
from torch import nn

from fastswin.models import SwinConfig, SwinTransformer

WIDTH, DEPTHS, HEADS, CLASSES = 24, (2, 2), (2, 4), 5


def timm_model(
    version: int, size: tuple[int, int], drop_path: float = 0.0, **settings
) -> nn.Module:
    from timm.models import swin_transformer, swin_transformer_v2

    kind = [swin_transformer.SwinTransformer, swin_transformer_v2.SwinTransformerV2][version - 1]
    return kind(
        img_size=size, embed_dim=WIDTH, num_heads=HEADS, window_size=4, num_classes=CLASSES,
        drop_path_rate=drop_path, **({"depths": DEPTHS} | settings),
    )  # fmt: skip


def torchvision_model(
    version: int,
    size: tuple[int, int],
    drop_path: float = 0.0,
    depths: tuple[int, ...] = DEPTHS,
    **settings,
) -> nn.Module:
    from torchvision.models import swin_transformer as tv

    return tv.SwinTransformer(
        [4, 4], WIDTH, list(depths), list(HEADS), [4, 4], num_classes=CLASSES,
        stochastic_depth_prob=drop_path,
        block=tv.SwinTransformerBlock if version == 1 else tv.SwinTransformerBlockV2,
        downsample_layer=tv.PatchMerging if version == 1 else tv.PatchMergingV2, **settings,
    )  # fmt: skip


def transformers_model(
    version: int, size: tuple[int, int], drop_path: float = 0.0, **settings
) -> nn.Module:
    import transformers

    name = "Swin" if version == 1 else "Swinv2"
    config = getattr(transformers, f"{name}Config")(
        image_size=size if version == 1 else size[0], embed_dim=WIDTH, depths=list(DEPTHS),
        num_heads=list(HEADS), window_size=4, num_labels=CLASSES, drop_path_rate=drop_path,
        **settings,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForImageClassification")(config)


def microsoft_model(version: int, size: tuple[int, int], drop_path: float = 0.0) -> nn.Module:
    return MsSwin(size, WIDTH, DEPTHS, HEADS, 4, version=version, num_classes=CLASSES)


def our_model(
    version: int, size: tuple[int, int], drop_path: float = 0.0, **settings
) -> SwinTransformer:
    tiny = {"embed_dim": WIDTH, "depths": DEPTHS, "num_heads": HEADS, "window_size": 4}
    return SwinTransformer(
        SwinConfig(
            version=version,
            image_size=size,
            num_classes=CLASSES,
            drop_path_rate=drop_path,
            **(tiny | settings),
        )
    )


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "timm": timm_model,
    "torchvision": torchvision_model,
    "transformers": transformers_model,
    "microsoft": microsoft_model,
    "ours": our_model,
}

#: Where padding has one meaning for all, maps of 16x12 and 8x6 are padded; elsewhere whole windows,
#: of which one covers the narrow side of the second stage. transformers' V2 takes squares only.
PADDED, WHOLE, SQUARE = (64, 48), (64, 32), (64, 64)

CASES = {
    f"{framework} V{version}": (framework, version) for framework in BUILDERS for version in (1, 2)
}


def image_size(case: str) -> tuple[int, int]:
    if case == "transformers V2":
        return SQUARE
    return WHOLE if CASES[case][0] in ("timm", "microsoft") else PADDED


def build(case: str, **settings) -> nn.Module:
    """A model in training mode with every weight away from its default."""
    framework, version = CASES[case]
    torch.manual_seed(2)
    model = BUILDERS[framework](version, image_size(case), **settings)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def images(case: str, batch: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(batch, 3, *image_size(case), generator=generator).to(dtype)


def logits(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return getattr(out, "logits", out)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The Swin blocks of any of these models."""
    names = ("SwinTransformerBlock", "SwinTransformerV2Block", "SwinTransformerBlockV2",
             "SwinLayer", "Swinv2Layer", "MsBlock")  # fmt: skip
    return [m for m in model.modules() if type(m).__name__.removeprefix("Fused") in names]
