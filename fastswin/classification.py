"""Photos in, the k most probable classes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fastswin.data.images import load_images
from fastswin.data.preprocess import Preprocess

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Guess:
    """One of an image's most probable classes; ``probability`` lies in [0, 1]."""

    index: int
    name: str
    probability: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image, best first."""

    image: str
    guesses: list[Guess]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return dataclasses.asdict(self)


def top_guesses(logits: torch.Tensor, class_names: Sequence[str], top: int) -> list[list[Guess]]:
    """The ``top`` largest softmax probabilities of each row, best first.

    Args:
        logits: ``[B, classes]``.
        class_names: one name a class.
        top: at most this many; fewer where the model has fewer classes.

    Raises:
        ValueError: ``top`` is not positive, or a row holds NaN or infinity.
    """
    if top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    logits = logits.float()
    broken = int((~torch.isfinite(logits).all(dim=1)).sum())
    if broken:
        raise ValueError(
            f"precision: {broken} of {len(logits)} images have NaN or infinite logits; "
            "use bf16 or fp32"
        )
    probabilities, indices = logits.softmax(1).topk(min(top, logits.shape[1]), dim=1)
    return [
        [Guess(i, class_names[i], p) for i, p in zip(row, values, strict=True)]
        for row, values in zip(indices.tolist(), probabilities.tolist(), strict=True)
    ]


def classify_files(
    forward: Forward,
    paths: Sequence[str | Path],
    preprocess: Preprocess,
    class_names: Sequence[str],
    *,
    top: int = 5,
    batch: int = 16,
    device: torch.device | str = "cpu",
) -> Iterator[Prediction]:
    """Classify photos, one prediction a file in the order given.

    Args:
        forward: float images ``[B, channels, h, w]`` to logits.
        paths: photo files of any size and mode.
        preprocess: the model's.
        class_names: one name a class.
        top: classes per image.
        batch: images per forward call.
        device: where images go.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged; the message names it.
    """
    for chunk in _chunks(paths, batch):
        pixels = load_images(chunk, preprocess).to(device)
        with torch.no_grad():
            logits = forward(preprocess(pixels))
        rows = top_guesses(logits, class_names, top)
        for path, guesses in zip(chunk, rows, strict=True):
            yield Prediction(str(path), guesses)


def _chunks(paths: Sequence[str | Path], size: int) -> Iterable[Sequence[str | Path]]:
    if size < 1:
        raise ValueError(f"batch must be at least 1, got {size}")
    return (paths[i : i + size] for i in range(0, len(paths), size))
