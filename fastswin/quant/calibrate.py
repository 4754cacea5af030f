"""Post-training calibration: images through the fp32 model, ranges of every layer out.

    images -> forward pass with observers -> histograms -> ranges of a scheme

The model runs in evaluation mode whatever its flag says, so no layer is skipped by drop path, and
leaves with its flags as they were. Histograms do not depend on the order of the images; under
``torch.distributed`` each process observes its share and all end with the same sum.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from fastswin.models.swin import SwinTransformer
from fastswin.quant.forward import run
from fastswin.quant.layers import QuantLayer, quant_layers
from fastswin.quant.observations import Observations
from fastswin.quant.ranges import (
    Calibration,
    QuantizationError,
    build_ranges,
    fingerprint_of,
    output_parts,
)
from fastswin.quant.scheme import Scheme, find_scheme

Batch = torch.Tensor | Sequence[torch.Tensor]

#: Batches between two writes of the state of a resumable run.
STATE_EVERY = 16


def calibrate(
    model: SwinTransformer,
    images: torch.Tensor | Iterable[Batch],
    scheme: str | Scheme = "int8",
    *,
    state: str | os.PathLike[str] | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Calibration:
    """Choose the ranges of every quantisable layer from what it sees of some images.

    Args:
        model: the readable fp32 model, on any device; it is not changed.
        images: normalised float images ``[B, channels, h, w]``: one tensor, or a stream of batches
            (of ``(images, labels)`` pairs as well, whose labels are ignored).
        scheme: a preset's name or a scheme.
        state: file that keeps what was seen so far; a run that was interrupted goes on from it,
            given the same images, and removes it at the end. Under torchrun each process adds its
            rank to the name.
        on_batch: called with the number of images after each batch.

    Returns:
        The ranges, which belong to these weights and this scheme.

    Raises:
        QuantizationError: no images, or a layer that saw NaN or infinity; the message names it.
        ValueError: an unknown scheme, or a state file of other weights.
    """
    scheme = find_scheme(scheme)
    return calibration_of(model, observe(model, images, state=state, on_batch=on_batch), scheme)


@torch.no_grad()
def observe(
    model: SwinTransformer,
    images: torch.Tensor | Iterable[Batch],
    *,
    state: str | os.PathLike[str] | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Observations:
    """Histograms of every layer's input and output, from which any scheme's ranges follow.

    Arguments and errors are those of :func:`calibrate`.
    """
    fingerprint = fingerprint_of(model)
    path = _own_path(state)
    seen = Observations(fingerprint)
    if path is not None and path.exists():
        seen = Observations.load(path)
        if seen.model_fingerprint != fingerprint:
            raise ValueError(f"state: {path} belongs to other weights; remove it or use another")
    product = _Observer(seen)
    layers = quant_layers(model)
    device = next(model.parameters()).device
    stream = [images] if isinstance(images, torch.Tensor) else images
    with _evaluating(model):
        for number, batch in enumerate(stream):
            if number < seen.batches:  # of the run that was interrupted
                continue
            pixels = batch if isinstance(batch, torch.Tensor) else batch[0]
            run(model, layers, pixels.to(device), product)
            seen.batches += 1
            seen.images += len(pixels)
            if path is not None and seen.batches % STATE_EVERY == 0:
                seen.save(path)
            if on_batch is not None:
                on_batch(len(pixels))
    seen.all_reduce(device)
    if path is not None:
        path.unlink(missing_ok=True)
    return seen


def calibration_of(model: SwinTransformer, seen: Observations, scheme: str | Scheme) -> Calibration:
    """The ranges of one scheme out of observations; cheap, so that one pass serves all schemes.

    Raises:
        QuantizationError: no images were seen, other weights, or a layer that saw NaN or infinity.
    """
    scheme = find_scheme(scheme)
    if seen.images == 0:
        raise QuantizationError("images: calibration needs at least one image, got 0")
    if seen.model_fingerprint != fingerprint_of(model):
        raise QuantizationError("observations: made with other weights")
    ranges = {}
    for name in quant_layers(model):
        layer = scheme.layer(name)
        try:
            amax = [
                seen.histogram(name, part).amax(layer.observer, layer.percentile, layer.format)
                for part in ("input", *output_parts(name))
            ]
        except ValueError as error:
            raise QuantizationError(f"{name}: {error}") from None
        ranges[name] = (amax[0], tuple(amax[1:]))
    return Calibration(
        scheme, build_ranges(model, scheme, ranges), seen.model_fingerprint, seen.images
    )


def _own_path(state: str | os.PathLike[str] | None) -> Path | None:
    """A process's own state file: the path itself, with the rank where there are several."""
    if state is None:
        return None
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return Path(f"{os.fspath(state)}.{distributed.get_rank()}")
    return Path(state)


class _Observer:
    """Float products that are looked at."""

    def __init__(self, seen: Observations) -> None:
        self.seen = seen
        self.weights: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def linear(self, layer: QuantLayer, x: torch.Tensor) -> torch.Tensor:
        if layer.name not in self.weights:
            weight, bias = layer.folded(torch.float64)
            dtype = layer.linear.weight.dtype
            self.weights[layer.name] = weight.to(dtype), None if bias is None else bias.to(dtype)
        y = F.linear(x, *self.weights[layer.name])
        self.seen.histogram(layer.name, "input").observe(x)
        parts = output_parts(layer.name)
        for part, values in zip(parts, y.chunk(max(len(parts), 1), dim=-1), strict=False):
            self.seen.histogram(layer.name, part).observe(values)
        return y

    def pad_qkv(self, layer: QuantLayer) -> torch.Tensor | None:
        return layer.bias


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; every module's own flag is put back after it."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in flags.items():
            module.training = training
