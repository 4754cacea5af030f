"""``accelerate`` and ``restore``: plan every swap, then change classes, all or nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import cast, get_args

import torch
from torch import nn

from fastswin._triton.available import Impl, why_not_triton
from fastswin.accelerate import huggingface, microsoft, ours, timm, torchvision
from fastswin.accelerate.block import FusedBlock
from fastswin.accelerate.layers import layer_mixin
from fastswin.accelerate.report import AccelerateReport, Kept, Swapped
from fastswin.accelerate.swap import Fused, Options, fuse, unfuse

#: Readers by framework; Microsoft's last, since it goes by attributes and the others by class.
FRAMEWORKS: dict[str, ModuleType] = {
    "fastswin": ours,
    "timm": timm,
    "torchvision": torchvision,
    "transformers": huggingface,
    "Microsoft-style": microsoft,
}

RESIDUAL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def accelerate(
    model: nn.Module,
    *,
    residual_dtype: torch.dtype | None = None,
    recompute_gelu: bool = True,
    impl: Impl = "auto",
) -> AccelerateReport:
    """Run the blocks of a live Swin model on fused operators, in training and inference.

    Modules change their class in place. Parameters, buffers, state-dict keys, ``requires_grad``,
    hooks on modules around the blocks, optimizers and averages that hold the parameters stay the
    objects that they are. Settings of the model (drop path, dropout, train and eval) keep working.

    Args:
        model: a timm, torchvision or transformers Swin (V1, V2), a model in Microsoft's style or
            ours; also as a part of a larger model, or inside DDP or ``torch.compile``.
        residual_dtype: dtype of the residual stream under autocast. None keeps the model's own
            rule; ``torch.bfloat16`` saves memory traffic and changes the numbers.
        recompute_gelu: keep one activation of the MLP instead of two for the backward.
        impl: "auto", "triton" (raises where a kernel cannot run) or "reference".

    Returns:
        What was swapped, and what was not with reasons; ``print`` it.

    Raises:
        TypeError: the model has no Swin block.
        ValueError: no block can be swapped (the message says why), parameters on several devices,
            or an argument is off. The model is untouched.
    """
    options = _checked(model, residual_dtype, recompute_gelu, impl)
    before = [(m, type(m).__mro__[1], m._fastswin) for m in model.modules() if isinstance(m, Fused)]
    restore(model)  # what was accelerated before is planned anew
    try:
        swaps, kept = _plan(model)
    except Exception:
        for module, mixin, earlier in before:
            fuse(module, cast("type[Fused]", mixin), earlier)
        raise
    swapped = tuple(Swapped(s.name, type(s.module).__name__, s.framework) for s in swaps)
    for swap in swaps:
        fuse(swap.module, swap.mixin, options)
    return AccelerateReport(swapped, tuple(kept), tuple(_notes(model, options)))


def restore(model: nn.Module) -> int:
    """Give every accelerated module its own class back.

    Args:
        model: a model that :func:`accelerate` changed, or any other.

    Returns:
        How many modules were restored.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    fused = [module for module in model.modules() if isinstance(module, Fused)]
    for module in fused:
        unfuse(module)
    return len(fused)


def _checked(
    model: nn.Module, residual_dtype: torch.dtype | None, recompute_gelu: bool, impl: Impl
) -> Options:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if residual_dtype is not None and residual_dtype not in RESIDUAL_DTYPES:
        raise ValueError(
            f"residual_dtype must be None or one of {RESIDUAL_DTYPES}, got {residual_dtype}"
        )
    if impl not in get_args(Impl):
        raise ValueError(f"impl must be one of {get_args(Impl)}, got {impl!r}")
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) > 1:
        raise ValueError(
            f"model must have all parameters on one device, found {', '.join(devices)}"
        )
    return Options(residual_dtype, bool(recompute_gelu), impl)


@dataclasses.dataclass(frozen=True)
class _Swap:
    """One module and what it is to become."""

    name: str
    module: nn.Module
    mixin: type[Fused]
    framework: str


def _plan(model: nn.Module) -> tuple[list[_Swap], list[Kept]]:
    """Every swap of a model that is not accelerated, and what stays; raises as ``accelerate``."""
    swaps: list[_Swap] = []
    kept: list[Kept] = []
    kept_blocks: list[Kept] = []
    patch_convs = {id(conv) for conv in _patch_convs(model)}
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        framework, mixin, reason = _read(module, "block_mixin")
        is_block = mixin is not None
        if mixin is None:
            framework, mixin, reason = _read(module, "merging_mixin")
        if mixin is None:
            framework, mixin = "torch", layer_mixin(module, patch_convs)
        if mixin is None:
            continue
        reason = reason or mixin._fastswin_blocker(module)
        if is_block or (reason is None and framework != "torch"):
            inside.append(f"{name}." if name else "")
        if reason is None:
            swaps.append(_Swap(name, module, mixin, framework))
        else:
            kept.append(Kept(name, type(module).__name__, reason))
            kept_blocks += [kept[-1]] * is_block
    if not any(issubclass(swap.mixin, FusedBlock) for swap in swaps):
        _refuse(model, kept_blocks)
    return swaps, kept


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _read(module: nn.Module, what: str) -> tuple[str, type[Fused] | None, str | None]:
    """Framework and mixin of a block or a merging, by its class or a base.

    Args:
        module: any module.
        what: the readers' function, "block_mixin" or "merging_mixin".

    Returns:
        Framework, mixin, and a reason against a subclass with its own forward.
    """
    kinds = type(module).__mro__
    for framework, reader in FRAMEWORKS.items():
        for depth, kind in enumerate(kinds):
            mixin = getattr(reader, what)(_full_name(kind), module)
            if mixin is None:
                continue
            own = [(k, n) for k in kinds[:depth] for n in ("forward", "_attn") if n in vars(k)]
            reason = None
            if own:
                reason = f"{own[0][0].__name__} replaces {kind.__name__}.{own[0][1]}"
            return framework, mixin, reason
    return "", None, None


def _patch_convs(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        name = _full_name(type(module))
        for reader in FRAMEWORKS.values():
            conv = reader.patch_conv(name, module)
            if conv is not None:
                yield conv


def _refuse(model: nn.Module, blocks: list[Kept]) -> None:
    if blocks:
        raise ValueError(f"no block can be accelerated: {blocks[0].name}: {blocks[0].reason}")
    raise TypeError(f"{_full_name(type(model))} has no Swin block of {', '.join(FRAMEWORKS)}")


def _notes(model: nn.Module, options: Options) -> Iterator[str]:
    first = next(model.parameters())
    reason = why_not_triton(first.device, torch.float32)
    if options.impl != "reference" and reason is not None:
        yield f"on this device everything runs on PyTorch, no faster: {reason}"
    if options.residual_dtype is not None:
        yield f"residual stream in {options.residual_dtype} under autocast, not the model's own"
