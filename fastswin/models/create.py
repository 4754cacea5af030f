"""Named models, with random or pretrained weights."""

from __future__ import annotations

from typing import Any

import torch

from fastswin.models.config import SwinConfig
from fastswin.models.live import from_live
from fastswin.models.swin import SwinTransformer
from fastswin.models.variants import find_variant


def create_model(
    name: str, *, pretrained: bool = False, **config_overrides: Any
) -> SwinTransformer:
    """A published Swin Transformer by timm's name.

    Args:
        name: a variant, see :func:`fastswin.models.list_models`; a pretrained tag after a dot
            (``.ms_in22k``) chooses among timm's weights.
        pretrained: fetch weights through timm's hub; needs timm and, the first time, a network.
        **config_overrides: attributes of :class:`SwinConfig` to change. With ``pretrained``, any
            that changes a weight's shape must be one of ``num_classes``, ``image_size``,
            ``window_size`` or ``in_channels``, which timm adapts.

    Returns:
        The model: training mode and random weights, or eval mode and pretrained weights.

    Raises:
        ValueError: unknown name or attribute value.
        TypeError: unknown attribute.
        RuntimeError: ``pretrained=True`` without timm, or the weights could not be fetched.
    """
    config = find_variant(name).replace(**config_overrides)
    if not pretrained:
        return SwinTransformer(config)
    reference = from_live(_pretrained_timm_model(name, config, set(config_overrides)))
    if "num_classes" not in config_overrides:
        config = config.replace(num_classes=reference.config.num_classes)  # the tag decides
    with torch.device("meta"):
        model = SwinTransformer(config)
    try:
        model.load_state_dict(reference.state_dict(), assign=True)
    except RuntimeError as error:
        raise ValueError(
            f"{sorted(config_overrides)} change the shape of the pretrained weights of {name}"
        ) from error
    return model.requires_grad_(True).eval()


def _pretrained_timm_model(name: str, config: SwinConfig, overridden: set[str]) -> Any:
    """timm's model with its weights, at the overridden size and class count."""
    try:
        import timm
    except ImportError as error:
        raise RuntimeError(
            "pretrained=True reads weights through timm, which is not installed; "
            "pip install 'fastswin[timm]'"
        ) from error
    arguments: dict[str, Any] = {
        argument: getattr(config, attribute)
        for attribute, argument in (
            ("num_classes", "num_classes"),
            ("image_size", "img_size"),
            ("window_size", "window_size"),
            ("in_channels", "in_chans"),
        )
        if attribute in overridden
    }
    try:
        return timm.create_model(name, pretrained=True, **arguments)
    except Exception as error:  # timm and its hub client raise many kinds without a common base
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RuntimeError(
            f"timm could not provide pretrained weights of {name} ({reason}); check the network "
            "and the name's tag, or download the file and use load_checkpoint(path)"
        ) from error
