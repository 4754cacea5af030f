"""A fastswin model from a live one: timm, torchvision, Hugging Face, Microsoft style, or ours.

Weights alone do not say everything: scale, epsilon, dropout and window are read from the modules
themselves. What fastswin cannot reproduce is refused by name. No framework is imported; a module
is recognised by the names of its classes.
"""

from __future__ import annotations

import torch
from torch import nn

from fastswin.models.checkpoint.fit import fit_state
from fastswin.models.checkpoint.layout import parameters_only
from fastswin.models.checkpoint.report import few
from fastswin.models.config import SwinConfig
from fastswin.models.live import huggingface, microsoft, ours, timm, torchvision
from fastswin.models.live.source import LiveSource, unwrap
from fastswin.models.swin import SwinTransformer

__all__ = ["config_of", "from_live", "official_state"]

SOURCES: tuple[LiveSource, ...] = (
    ours.SOURCE,
    timm.SOURCE,
    torchvision.SOURCE,
    huggingface.SOURCE,
    microsoft.SOURCE,  # last: it goes by attributes, the others by class
)


def config_of(module: nn.Module) -> SwinConfig:
    """Configuration of a live Swin model.

    Args:
        module: a timm ``SwinTransformer`` or ``SwinTransformerV2``, a torchvision
            ``SwinTransformer``, a transformers ``Swin[v2]Model`` or
            ``Swin[v2]ForImageClassification``, a module in Microsoft's style, or ours.
            ``torch.compile``, DataParallel and DDP wrappers are looked through.

    Raises:
        TypeError: no Swin, or a subclass with its own forward pass.
        ValueError: a setting that fastswin does not have; the message names it.
    """
    module = unwrap(module)
    return _source(module).config_of(module)


def official_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Current parameters under official names, without copies where none are needed.

    Args:
        module: as for :func:`config_of`.

    Returns:
        Detached tensors that share the module's memory, except for those that are fused from
        several (Hugging Face's qkv).

    Raises:
        TypeError, ValueError: as for :func:`config_of`; also parameters a Swin does not have.
    """
    module = unwrap(module)
    source = _source(module)
    config = source.config_of(module)
    state = parameters_only(source.layout.to_official(dict(module.state_dict())))
    fit = fit_state(state, config)
    if fit.missing or fit.unexpected:
        raise ValueError(
            f"{type(module).__name__} has other parameters than a Swin of its settings: "
            f"{len(fit.missing)} missing ({few(fit.missing)}), {len(fit.unexpected)} unexpected "
            f"({few(fit.unexpected)})"
        )
    return {name: tensor.detach() for name, tensor in fit.state.items()}


def from_live(module: nn.Module) -> SwinTransformer:
    """A fastswin model with a copy of a live model's settings and weights.

    Args:
        module: as for :func:`config_of`.

    Returns:
        The model in eval mode, on the module's device and in its dtype. Later changes of
        ``module`` do not reach it.

    Raises:
        TypeError, ValueError: as for :func:`config_of`.
    """
    module = unwrap(module)
    config = config_of(module)
    state = official_state(module)
    with torch.device("meta"):
        model = SwinTransformer(config)
    copies = {name: tensor.clone().contiguous() for name, tensor in state.items()}
    model.load_state_dict(copies, assign=True)
    return model.requires_grad_(True).eval()


def _source(module: nn.Module) -> LiveSource:
    for source in SOURCES:
        if source.accepts(module):
            return source
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    accepted = "; ".join(source.description for source in SOURCES)
    raise TypeError(f"{name} is not a Swin model; accepted: {accepted}")
