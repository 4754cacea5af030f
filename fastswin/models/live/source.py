"""What every framework's reader shares: recognising classes, and reading one value from many."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from fastswin.models.checkpoint.layout import Layout
from fastswin.models.config import SwinConfig
from fastswin.models.geometry import resolve_window

Pair = tuple[int, int]
T = TypeVar("T")

_FORWARD = ("forward", "forward_features", "forward_head")


@dataclasses.dataclass(frozen=True)
class LiveSource:
    """One framework's reader.

    Attributes:
        description: the classes it takes, for messages.
        accepts: whether a module is one of them.
        config_of: its settings.
        layout: its state-dict layout.
    """

    description: str
    accepts: Callable[[nn.Module], bool]
    config_of: Callable[[nn.Module], SwinConfig]
    layout: Layout


def unwrap(module: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``, DataParallel and DistributedDataParallel."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(module, parallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


def is_a(module: nn.Module, *names: str) -> bool:
    """Whether a module is of one of the classes ``package.module.Class``, or a subclass.

    Raises:
        TypeError: a subclass that replaces the forward pass, which could not be reproduced.
    """
    classes = type(module).__mro__
    for depth, kind in enumerate(classes):
        if f"{kind.__module__}.{kind.__qualname__}" in names:
            replaced = [n for c in classes[:depth] for n in _FORWARD if n in vars(c)]
            if replaced:
                raise TypeError(
                    f"{classes[0].__qualname__} replaces {kind.__qualname__}.{replaced[0]}, "
                    "which cannot be reproduced"
                )
            return True
    return False


def only(values: Iterable[T], setting: str) -> T:
    """The one value that all layers share; ValueError names the setting otherwise."""
    found: list[T] = []
    for value in values:
        if value not in found:
            found.append(value)
    if len(found) != 1:
        raise ValueError(f"{setting} must be the same in all layers, got {found}")
    return found[0]


def require(condition: bool, setting: str, value: Any, legal: str) -> None:
    """ValueError that names an unsupported setting, its value and the legal ones."""
    if not condition:
        raise ValueError(f"unsupported {setting}={value!r}; legal: {legal}")


def square(value: int | Iterable[int], setting: str) -> int:
    """The side of something square."""
    sides = (value, value) if isinstance(value, int) else tuple(value)
    require(len(sides) == 2 and sides[0] == sides[1], setting, value, "equal sides")
    return sides[0]


def patch_side(proj: nn.Module) -> int:
    """Patch size of a patch-embedding convolution."""
    require(isinstance(proj, nn.Conv2d), "patch_embed.proj", type(proj).__name__, "nn.Conv2d")
    assert isinstance(proj, nn.Conv2d)
    kernel = square(proj.kernel_size, "patch_size")
    plain = proj.stride == proj.kernel_size and proj.groups == 1 and proj.bias is not None
    plain = plain and proj.padding in ((0, 0), "valid") and proj.dilation == (1, 1)
    require(plain, "patch_embed.proj", proj, "stride = kernel, no padding, groups or dilation")
    return kernel


def norm_eps(norms: Iterable[nn.Module], setting: str) -> float:
    """The epsilon that LayerNorms share."""

    def eps(norm: nn.Module) -> float:
        known = isinstance(norm, nn.LayerNorm) and norm.elementwise_affine
        require(known, setting, type(norm).__name__, "nn.LayerNorm with weight and bias")
        assert isinstance(norm, nn.LayerNorm)
        require(norm.bias is not None, setting, norm, "nn.LayerNorm with weight and bias")
        return norm.eps

    return only((eps(norm) for norm in norms), f"{setting} eps")


def check_gelu(activation: object) -> None:
    """Refuse anything but the exact (erf) GELU."""
    name = getattr(activation, "__name__", type(activation).__name__)
    exact = name in ("GELU", "GELUActivation", "gelu")
    exact = exact and getattr(activation, "approximate", "none") == "none"
    require(exact, "activation", name, "the exact GELU")


def drop_path_rate(blocks: Iterable[nn.Module], name: str, attribute: str) -> float:
    """Stochastic depth of the last block, which is the configured rate."""
    rates = [float(getattr(getattr(b, name, None), attribute, None) or 0.0) for b in blocks]
    return max(rates, default=0.0)


def mlp_ratio(pairs: Iterable[tuple[nn.Module, nn.Module]]) -> float:
    """Hidden channels over channels, from ``(fc1, fc2)`` of every block."""

    def ratio(fc1: nn.Module, fc2: nn.Module) -> float:
        for layer in (fc1, fc2):
            require(isinstance(layer, nn.Linear), "mlp", type(layer).__name__, "nn.Linear")
        assert isinstance(fc1, nn.Linear)
        return fc1.out_features / fc1.in_features

    return only((ratio(fc1, fc2) for fc1, fc2 in pairs), "mlp_ratio")


def qk_scale(scales: Iterable[tuple[float, int]]) -> float | None:
    """V1's scale from ``(scale, head_dim)`` of every block; None where it is the default."""
    scales = list(scales)
    if all(abs(scale - dim**-0.5) <= 1e-9 for scale, dim in scales):
        return None
    return only((float(scale) for scale, _ in scales), "qk_scale")


def check_widths(config: SwinConfig, widths: list[list[int]]) -> None:
    """Every block of stage ``i`` must have ``embed_dim * 2**i`` channels."""
    expected = [[config.dim(stage)] * depth for stage, depth in enumerate(config.depths)]
    require(widths == expected, "embed_dim per stage", widths, f"{expected} (doubling)")


def check_windows(config: SwinConfig, windows: list[list[tuple[Pair, Pair]]]) -> None:
    """Each block's ``(window, shift)`` must be what the configuration builds.

    Raises:
        ValueError: windows per stage, or another rule for small maps; the message names the stage.
    """
    for stage, blocks in enumerate(windows):
        built = resolve_window(config.map_size(stage), config.window_size, config.window_convention)
        for block, (window, shift) in enumerate(blocks):
            expected = built.shift_size if block % 2 else (0, 0)
            if (window, shift) != (built.window_size, expected):
                raise ValueError(
                    f"unsupported window_size per stage: stage {stage} block {block} has window "
                    f"{window} and shift {shift}, but window_size {config.window_size} on a map "
                    f"of {config.map_size(stage)} gives {built.window_size} and {expected}"
                )


def largest_window(windows: Iterable[Pair]) -> Pair:
    """The configured window behind windows that small maps may have shrunk."""
    sides = list(windows)
    return max(w[0] for w in sides), max(w[1] for w in sides)


def pair(value: int | Iterable[int]) -> Pair:
    """``(value, value)`` or the two values as plain integers."""
    if isinstance(value, torch.Tensor):
        value = int(value)
    if isinstance(value, int):
        return value, value
    first, second = (int(v) for v in value)
    return first, second


def any_pretrained(windows: Iterable[int | Iterable[int]]) -> tuple[int, ...] | None:
    """V2's pretrained windows per stage; None when all are 0."""
    sides = tuple(square(w, "pretrained_window_sizes") for w in windows)
    return sides if any(sides) else None


def head_classes(head: nn.Module) -> int:
    """Width of a linear head, 0 for none."""
    if isinstance(head, nn.Identity):
        return 0
    require(isinstance(head, nn.Linear), "head", type(head).__name__, "nn.Linear or nn.Identity")
    assert isinstance(head, nn.Linear)
    return head.out_features
