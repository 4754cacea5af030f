"""Which layout a state dict has and which prefix stands before it, from names and shapes alone.

Every layout has an anchor, the shape of a block's names. The layout whose anchor fits most names
is taken, and what stands before the anchor is the prefix (``module.``, ``backbone.``, ``encoder.``,
``module.backbone.`` ...). It is removed once and from the front only.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from fastswin.models.checkpoint import huggingface, microsoft, openmmlab, timm, torchvision
from fastswin.models.checkpoint.errors import CheckpointError
from fastswin.models.checkpoint.layout import Layout, State

#: timm before microsoft: they share the blocks' names, and timm's test is the narrower one.
LAYOUTS: tuple[Layout, ...] = (
    huggingface.LAYOUT,
    torchvision.LAYOUT,
    openmmlab.LAYOUT,
    timm.LAYOUT,
    microsoft.LAYOUT,
)


class Detected(NamedTuple):
    """A recognised state dict."""

    layout: Layout
    state: dict[str, torch.Tensor]  # without the prefix
    prefix: str


def detect_layout(state: State) -> Detected:
    """Recognise a Swin state dict of any layout and take its prefix off.

    Raises:
        CheckpointError: no Swin, or two models under different prefixes; the message says what
            was seen.
    """
    counts: dict[str, Counter[str]] = {}
    for layout in LAYOUTS:
        found = (layout.anchor.match(name) for name in state)
        counts[layout.name] = Counter(hit[1] for hit in found if hit)
    best = max(LAYOUTS, key=lambda layout: counts[layout.name].total())
    prefixes = counts[best.name]
    if not prefixes:
        raise CheckpointError(_not_swin(state))
    if len(prefixes) > 1:
        raise CheckpointError(
            f"more than one model in this checkpoint, under the prefixes {sorted(prefixes)}; "
            "pass a dict with the one you mean"
        )
    prefix = next(iter(prefixes))
    stripped = strip_prefix(state, prefix)
    for layout in LAYOUTS:
        if layout.anchor.pattern == best.anchor.pattern and layout.matches(stripped):
            return Detected(layout, stripped, prefix)
    raise CheckpointError(_not_swin(state))


def strip_prefix(state: State, prefix: str) -> dict[str, torch.Tensor]:
    """Remove ``prefix`` from the front; names outside it lose the parts they share with it.

    ``module.backbone.norm.weight`` and ``module.head.fc.weight`` under ``module.backbone.`` become
    ``norm.weight`` and ``head.fc.weight``. A name that would collide keeps its full form.
    """
    parts = prefix.split(".")[:-1]
    stripped = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
    for name, tensor in state.items():
        if name.startswith(prefix):
            continue
        short = name
        for depth in range(len(parts) - 1, 0, -1):
            outer = ".".join(parts[:depth]) + "."
            if name.startswith(outer):
                short = name.removeprefix(outer)
                break
        stripped[name if short in stripped else short] = tensor
    return stripped


def _not_swin(state: State) -> str:
    first = ", ".join(f"{n} {list(t.shape)}" for n, t in list(state.items())[:3])
    convolutions = sum(t.ndim == 4 and n.endswith("weight") for n, t in state.items())
    return (
        f"not a Swin Transformer: no window-attention blocks among {len(state)} tensors "
        f"({convolutions} convolutions); first are {first}"
    )
