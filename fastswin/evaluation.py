"""Accuracy of precisions beside the readable fp32 model, over a stream of labelled batches.

    top-k      share of images whose label is among the k largest logits
    agreement  share of images whose largest logit is the reference's
    max abs    largest difference of any logit from the reference's

Quantised precisions run in the engine on a GPU, every layer as its scheme says (mix "scheme"), and
through the integer reference on a CPU. Everything is counted batch by batch; nothing but counts is
kept, and those of several processes add up. A row with a NaN or infinity counts as wrong and is
reported, since an arg-max over it would be an accident.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from fastswin.bench.precision import fp32_scope
from fastswin.engine import Engine
from fastswin.engine.calibration import precision_of
from fastswin.models import SwinTransformer
from fastswin.quant import PRESETS, Calibration, QuantizationError, QuantizedSwin

Forward = Callable[[torch.Tensor], torch.Tensor]
Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]

#: Name of the readable model's row.
REFERENCE = "reference"

#: Top-1 agreement that a precision owes the fp32 reference, in percent of the images.
MIN_AGREEMENT_PERCENT = {REFERENCE: 100.0, "fp32": 100.0, "tf32": 99.5, "fp16": 99.5}


@dataclasses.dataclass
class Score:
    """Running counts of one candidate.

    Attributes:
        images: images seen.
        correct_top1, correct_top5: images whose label is the largest / among the five largest
            logits (all of them where the model has fewer than five classes).
        agreeing: images with the reference's top-1.
        max_abs_diff: largest absolute difference from the reference's logits.
        non_finite: images with a NaN or infinity among their logits.
        seconds: time spent in the candidate, device work included.
    """

    images: int = 0
    correct_top1: int = 0
    correct_top5: int = 0
    agreeing: int = 0
    max_abs_diff: float = 0.0
    non_finite: int = 0
    seconds: float = 0.0

    def add(
        self, logits: torch.Tensor, reference: torch.Tensor, labels: torch.Tensor, seconds: float
    ) -> None:
        """Count one batch: logits and reference logits ``[B, classes]``, labels ``[B]``."""
        logits, reference = logits.float(), reference.float()
        finite = torch.isfinite(logits).all(dim=1)
        first = logits.argmax(dim=1)
        five = logits.topk(min(5, logits.shape[1]), dim=1).indices
        self.images += len(labels)
        self.correct_top1 += int(((first == labels) & finite).sum())
        self.correct_top5 += int(((five == labels[:, None]).any(dim=1) & finite).sum())
        self.agreeing += int(((first == reference.argmax(dim=1)) & finite).sum())
        self.non_finite += int((~finite).sum())
        if finite.any():
            difference = (logits - reference)[finite].abs().max()
            self.max_abs_diff = max(self.max_abs_diff, float(difference))
        self.seconds += seconds

    def merge(self, other: Score) -> None:
        """Add what another process counted of its share; its time ran beside this one's."""
        self.images += other.images
        self.correct_top1 += other.correct_top1
        self.correct_top5 += other.correct_top5
        self.agreeing += other.agreeing
        self.non_finite += other.non_finite
        self.max_abs_diff = max(self.max_abs_diff, other.max_abs_diff)
        self.seconds = max(self.seconds, other.seconds)

    def percent(self, count: int) -> float:
        """``count`` in percent of the images, 0 without images."""
        return 100.0 * count / self.images if self.images else 0.0

    def to_dict(self) -> dict[str, float | int]:
        """JSON-ready values: percentages, differences, images per second."""
        return {
            "images": self.images,
            "top1_percent": round(self.percent(self.correct_top1), 4),
            "top5_percent": round(self.percent(self.correct_top5), 4),
            "agreement_percent": round(self.percent(self.agreeing), 4),
            "max_abs_diff": self.max_abs_diff,
            "non_finite_images": self.non_finite,
            "seconds": round(self.seconds, 4),
            "images_per_s": round(self.images / self.seconds, 1) if self.seconds else 0.0,
        }


class ReferenceModel:
    """The readable model in fp32 (never TF32), its attention on the PyTorch reference.

    Args:
        model: its parameters are cast to fp32, moved and used in place.
        device: where to run.
    """

    def __init__(self, model: SwinTransformer, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.model = model.float().to(self.device).eval().requires_grad_(True)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """float32 images ``[B, channels, h, w]`` to float32 logits ``[B, classes]``.

        Gradients are on because that is what makes the operators take their reference; nothing is
        saved for a backward pass, so memory stays that of inference.
        """
        dropped = torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing)
        with fp32_scope(tf32=False), torch.enable_grad(), dropped:
            return self.model(images.to(self.device)).detach()


def _nothing(_: torch.Tensor) -> torch.Tensor:
    return torch.empty(0)


def evaluate(
    candidates: Mapping[str, Forward],
    reference: Forward,
    batches: Batches,
    *,
    device: torch.device | str = "cpu",
    on_batch: Callable[[int], None] | None = None,
) -> dict[str, Score]:
    """Score candidates and the reference over one pass of the data.

    Args:
        candidates: name to a callable from images to logits ``[B, classes]``.
        reference: the callable they are compared with; it gets a row too, named "reference".
        batches: float images ``[B, channels, h, w]`` and integer labels ``[B]``.
        device: where images are moved before the clock starts.
        on_batch: called with the number of images after each batch.

    Returns:
        One :class:`Score` a name, "reference" first.

    Raises:
        ValueError: a candidate is named "reference", a label is outside the model's classes, or
            logits have another shape than the reference's.
    """
    if REFERENCE in candidates:
        raise ValueError(f"candidates must not use the name {REFERENCE!r}")
    scores = {name: Score() for name in (REFERENCE, *candidates)}
    device = torch.device(device)
    for images, labels in batches:
        images = images.to(device)
        expected, seconds = _timed(reference, images)
        labels = labels.to(expected.device).long()
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < expected.shape[1]:
            raise ValueError(
                f"labels must lie in [0, {expected.shape[1]}), the classes of the model; got "
                f"{int(labels.min())} to {int(labels.max())}"
            )
        scores[REFERENCE].add(expected, expected, labels, seconds)
        for name, forward in candidates.items():
            logits, seconds = _timed(forward, images)
            if logits.shape != expected.shape:
                raise ValueError(
                    f"{name}: logits are {tuple(logits.shape)}, the reference's "
                    f"{tuple(expected.shape)}"
                )
            scores[name].add(logits.to(expected.device), expected, labels, seconds)
        if on_batch is not None:
            on_batch(len(labels))
    return scores


def evaluate_precisions(
    model: SwinTransformer,
    precisions: Sequence[str],
    batches: Batches,
    *,
    device: torch.device | str,
    calibrations: Mapping[str, Calibration] | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> dict[str, Score]:
    """Score several precisions of a model against its readable fp32 form.

    Args:
        model: the model; it is moved to ``device`` in fp32.
        precisions: engine precisions, and names of ``calibrations``; each one row.
        batches, on_batch: as in :func:`evaluate`.
        device: where everything runs.
        calibrations: ranges by scheme name; such a precision runs in the engine on a GPU, through
            the integer reference on a CPU.

    Raises:
        ValueError: a precision that is unknown, lacks its ranges or cannot run on the device,
            before any image is read.
    """
    device = torch.device(device)
    calibrations = calibrations or {}
    for name in precisions:
        if name in PRESETS and name not in calibrations:
            raise QuantizationError(
                f"precision {name!r} needs ranges, and this model has "
                f"{', '.join(sorted(calibrations)) or 'none'}; run fastswin calibrate --scheme "
                f"{name} and give its file as --calibration"
            )
    engines: dict[str, Forward] = {}
    integer = []
    for name in precisions:
        ranges = calibrations.get(name)
        serves: Any = name if ranges is None else precision_of(ranges.scheme)
        if ranges is not None and (device.type == "cpu" or serves is None):
            integer.append(name)
        else:
            engines[name] = Engine(model, serves, device=device, calibration=ranges, mix="scheme")
    reference = ReferenceModel(model, device)
    engines |= {name: QuantizedSwin(model, calibrations[name]) for name in integer}
    candidates = {name: engines[name] for name in precisions}
    return evaluate(candidates, reference, batches, device=device, on_batch=on_batch)


def merge_scores(parts: Iterable[Mapping[str, Score]]) -> dict[str, Score]:
    """Scores over all images from those of several processes."""
    total: dict[str, Score] = {}
    for part in parts:
        for name, score in part.items():
            total.setdefault(name, Score()).merge(score)
    return total


def failed_gates(
    scores: Mapping[str, Score],
    points: float = 0.1,
    *,
    quantized: Collection[str] = (),
    quantized_points: float = 0.3,
) -> list[str]:
    """Which candidates are not the reference, one line each; empty when all are.

    Args:
        scores: what :func:`evaluate` returned, candidates named by precision.
        points: largest legal difference of top-1 accuracy, in percentage points.
        quantized: candidates that owe less.
        quantized_points: their largest legal loss of top-1 accuracy.
    """
    lines = []
    expected = scores[REFERENCE]
    for name, score in scores.items():
        if score.non_finite:
            lines.append(f"{name}: NaN or infinity in the logits of {score.non_finite} images")
        gap = score.percent(score.correct_top1) - expected.percent(expected.correct_top1)
        if -gap > quantized_points + 1e-9 if name in quantized else abs(gap) > points + 1e-9:
            lines.append(f"{name}: top-1 differs by {gap:+.2f} points from the reference's")
        needed = MIN_AGREEMENT_PERCENT.get(name, 0.0)
        found = score.percent(score.agreeing)
        if score.images and found < needed:
            lines.append(f"{name}: top-1 agreement {found:.2f} % is below {needed} %")
    return lines


def _timed(forward: Forward, images: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Logits and seconds, waiting for the device on both sides of the clock."""
    _wait(images.device)
    start = time.perf_counter()
    with torch.no_grad():
        logits = forward(images)
    _wait(images.device)
    return logits, time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
